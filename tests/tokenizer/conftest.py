"""Fixtures of the tokenizer tests: one small vocabulary in both file formats, trained once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.tokenizer.kimi_vocabulary import VOCAB_SIZE, train_ranks, write_kimi_folder

from deltafold.tokenizer import convert_tokenizer
from deltafold.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def ranks() -> list[bytes]:
    return train_ranks()


@pytest.fixture(scope="session")
def kimi_folder(ranks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi_folder(folder, ranks)
    return folder


@pytest.fixture(scope="session")
def json_folder(kimi_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary as tokenizer.json alone."""
    folder = tmp_path_factory.mktemp("json")
    shutil.copytree(kimi_folder, folder, dirs_exist_ok=True)
    convert_tokenizer(folder)
    (folder / "tiktoken.model").unlink()
    return folder


@pytest.fixture(scope="session")
def kimi(kimi_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(kimi_folder, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def converted(json_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(json_folder, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session", params=["tiktoken", "tokenizers"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Either kind: what a test says of one it says of both."""
    name = "kimi" if request.param == "tiktoken" else "converted"
    found = request.getfixturevalue(name)
    assert isinstance(found, Tokenizer)
    return found


@pytest.fixture
def kimi_copy(kimi_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(kimi_folder, tmp_path / "model")
    return tmp_path / "model"
