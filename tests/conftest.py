"""Fixtures that several folders share: one tiny checkpoint, its bare model, and an engine on it, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoints import base_config, write_checkpoint
from tests.stepping import PLACE, LoadedModel, load_model

from deltafold import Engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-gpu", action="store_true", help="run the shared tests on a GPU with the Triton backend")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--on-gpu"):
        PLACE.device, PLACE.backend = torch.device("cuda"), "triton"


LONG_FILES = ("test_compiling.py", "test_compiling_sm_121.py")
"""Begun first: at the end one of two processes would wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tests' tensors are tiny: a second thread would only wait, and on a busy machine it waits long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers with random weights; not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, base_config())
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """Its model, without an engine around it."""
    return load_model(tiny_folder)


@pytest.fixture(scope="session")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    """An engine on it; tests leave it idle and open."""
    with Engine.load(str(tiny_folder), max_num_seqs=8, seed=0, **PLACE.options) as loaded:
        yield loaded
