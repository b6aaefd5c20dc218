"""The built-in model behind the server: in this process, and in one of its own as users start it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.serving import ServerProcess

from deltafold import Engine

API_KEY = "key-of-the-tests"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin", device="cpu", max_num_seqs=8, max_model_len=1024) as engine:
        yield engine


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """`deltafold serve` with a key."""
    with ServerProcess("--api-key", API_KEY, "--max-model-len", "2048") as server:
        yield server
        assert server.terminate() == 0
