"""A model's name -> the folder with its files, and the JSON files in it.

Neighbours: `config.py` and `weights.py` read the folder, `api.py` resolves it. Nothing in the folder is executed.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable
from pathlib import Path

from deltafold.errors import LoadError, OptionError

BUILTIN = "builtin"
"""The name of the model inside the package."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ALLOWED_FILES = ("*.safetensors", "*.json", "tiktoken.model", "*.jinja")


def resolve_folder(model: str, revision: str | None = None) -> Path:
    """The local folder of `model`: "builtin", a folder's path, or else a Hugging Face id (downloaded if need be).

    Only weights, JSON files, tiktoken ranks and chat templates are downloaded, never code. `revision` is a branch,
    tag or commit of a hub id.

    Raises:
        LoadError: there is neither such a folder nor such an id, or the hub cannot be reached.
        OptionError: `revision` with a model that is not from the hub.
    """
    path = Path(model).expanduser()
    if model == BUILTIN or (model and path.is_dir()):
        if revision is not None:
            raise OptionError(f"revision {revision!r} applies to hub ids only, and {model!r} is a local folder")
        return _builtin_folder() if model == BUILTIN else path
    if path.is_file():
        raise LoadError(f"model {model!r} is a file; a folder with config.json and safetensors files is needed")
    if _HUB_ID.fullmatch(model) is None:
        raise LoadError(f"model {model!r}: there is no such folder, and it is not a hub id (NAME or OWNER/NAME)")
    return _download(model, revision)


def _builtin_folder() -> Path:
    folder = Path(str(importlib.resources.files("deltafold"))) / BUILTIN
    if not (folder / "config.json").is_file():
        raise LoadError(f"the built-in model is not installed: {folder / 'config.json'} does not exist")
    return folder


def _download(model: str, revision: str | None) -> Path:
    # Imported here because it costs a large part of the start of a process that needs no hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    # The hub's HTTP client has changed between releases; the parent of the hub's own error is that client's root.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(_ALLOWED_FILES))
    except (transport_error, EntryNotFoundError, OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise LoadError(
            f"model {model!r}: there is no such folder, and the hub did not give it{at}: {reason}"
        ) from error
    return Path(folder)


def read_json_object(path: Path, error: type[LoadError]) -> dict[str, object]:
    """The object in a JSON file. Raises `error`, which names the file, if it is not readable or not an object."""
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror}") from cause
    return parse_json_object(data, str(path), error)


def parse_json_object(data: bytes, what: str, error: type[LoadError]) -> dict[str, object]:
    """The object in UTF-8 encoded JSON. Raises `error`, which begins with `what`; a key given twice is refused."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys(what, error))
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} is not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{what} must hold a JSON object, got {type(value).__name__}")
    return value


def _unique_keys(what: str, error: type[LoadError]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise error(f"{what} has a key twice: {', '.join(twice)}")
        return result

    return build
