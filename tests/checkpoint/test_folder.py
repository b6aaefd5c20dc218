"""A model's name -> its folder; the hub is never reached here."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from deltafold.checkpoint import folder as folder_module
from deltafold.checkpoint.folder import resolve_folder
from deltafold.errors import LoadError, OptionError


def test_builtin_is_inside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folder_module.importlib.resources, "files", lambda package: tmp_path / package)
    with pytest.raises(LoadError, match="built-in model is not installed"):
        resolve_folder("builtin")
    inside = tmp_path / "deltafold" / "builtin"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    assert resolve_folder("builtin") == inside


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_folder("~/model") == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("model") == Path("model")
    for model in ("model", "builtin"):
        with pytest.raises(OptionError, match="revision 'main' applies to hub ids only"):
            resolve_folder(model, "main")


def test_file_instead_of_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"model\.gguf' is a file; a folder"):
        resolve_folder(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("model", ["", "/no/such/folder", "./model", "a/b/c", "a b", "owner/", "../x/y", "a\nb"])
def test_neither_folder_nor_hub_id(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any, **options: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unexpected)
    with pytest.raises(LoadError, match="there is no such folder, and it is not a hub id"):
        resolve_folder(model)


def test_hub_download_takes_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    def download(model: str, **options: Any) -> str:
        asked.append((model, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("owner/name", "v1") == tmp_path
    ((model, options),) = asked
    assert (model, options["revision"]) == ("owner/name", "v1")

    def is_taken(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in options["allow_patterns"])

    wanted = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00020.safetensors",
        "model.safetensors.index.json", "tiktoken.model", "tokenizer.json", "chat_template.jinja",
    ]  # fmt: skip
    unwanted = ["modeling_kimi.py", "sub/x.py", "pytorch_model.bin", "model.pt", "README.md", "a.json.py"]
    assert [file for file in wanted + unwanted if is_taken(file)] == wanted


def test_hub_errors_are_mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transport_error = huggingface_hub.errors.HfHubHTTPError.__bases__[0]
    for error in (
        transport_error("proxy refused\nmore"),
        ConnectionError("unreachable"),
        huggingface_hub.errors.LocalEntryNotFoundError("not cached"),
        huggingface_hub.errors.HFValidationError("bad id"),
    ):

        def fail(model: str, error: Exception = error, **options: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(LoadError, match="model 'owner/name': there is no such folder, and the hub") as caught:
            resolve_folder("owner/name")
        assert caught.value.__cause__ is error
        assert "\n" not in str(caught.value)


def test_hub_offline_with_nothing_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="at revision 'v2'"):
        resolve_folder("owner/name", "v2")
