"""The special-token table of a checkpoint, and the ids that end an answer.

Reads tokenizer_config.json and generation_config.json; `vocabulary.py` places the table behind the ordinary tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltafold.errors import TokenizerError

CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
NAMED_END_TOKENS = ("[EOS]", "<|im_end|>")
"""End tokens of Kimi's chat format: they end an answer wherever the table has them, named by the configs or not."""

_POSITION_FLAGS = ("lstrip", "rstrip", "single_word")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Control tokens by name. `hidden` are those flagged special: text shown to a user leaves them out, while
    the others (tool-call marks) are shown so that a caller can parse them."""

    ids: Mapping[str, int]
    hidden: frozenset[int]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        TokenizerError: the file is no UTF-8 JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _added_token(where: str, token_id: int, entry: object) -> tuple[str, bool]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
        raise TokenizerError(f"{where}: token {token_id} has no content string, got {entry!r}")
    for flag in _POSITION_FLAGS:
        if entry.get(flag):
            raise TokenizerError(f"{where}: token {token_id} {entry['content']!r} sets {flag}, which is not supported")
    return entry["content"], entry.get("special") is not False


def collect(where: str, entries: Iterable[tuple[int, object]]) -> SpecialTokens:
    """Check a table's entries (id, {"content", "special", ...}) and index them by name.

    Raises:
        TokenizerError: naming `where` and the entry that is malformed or given twice.
    """
    ids: dict[str, int] = {}
    names: dict[int, str] = {}
    hidden = set()
    for token_id, entry in entries:
        name, is_hidden = _added_token(where, token_id, entry)
        if ids.get(name, token_id) != token_id or names.get(token_id, name) != name:
            raise TokenizerError(
                f"{where}: token {token_id} {name!r} collides with token {ids.get(name, token_id)} "
                f"{names.get(token_id, name)!r}"
            )
        ids[name], names[token_id] = token_id, name
        if is_hidden:
            hidden.add(token_id)
    return SpecialTokens(ids, frozenset(hidden))


def read_added_tokens(folder: Path) -> list[tuple[int, object]]:
    """The entries of `added_tokens_decoder` in tokenizer_config.json: (id, entry), none if the key is absent."""
    path = folder / CONFIG_FILE
    table = read_json(path).get("added_tokens_decoder", {})
    if not isinstance(table, Mapping):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object, got {table!r}")
    entries: list[tuple[int, object]] = []
    for key, entry in table.items():
        if not (key.isascii() and key.isdecimal()):
            raise TokenizerError(f"{path}: added_tokens_decoder has the key {key!r}, which is no token id")
        entries.append((int(key), entry))
    return entries


def read_token_name(folder: Path, key: str) -> str | None:
    """A token's text by its role (`eos_token`, `bos_token`, ...) in tokenizer_config.json, or None."""
    value = read_json(folder / CONFIG_FILE).get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{folder / CONFIG_FILE}: {key} must be a string, got {value!r}")
    return value


def read_end_token_ids(folder: Path, token_ids: Mapping[str, int], *, vocab_size: int) -> frozenset[int]:
    """Ids that end an answer. `token_ids` maps the names a config may use to ids.

    Raises:
        TokenizerError: the configs name a token or an id that does not exist.
    """
    ends = {token_ids[name] for name in NAMED_END_TOKENS if name in token_ids}
    eos_token = read_token_name(folder, "eos_token")
    if eos_token is not None:
        if eos_token not in token_ids:
            raise TokenizerError(f"{folder / CONFIG_FILE}: eos_token {eos_token!r} is not in the vocabulary")
        ends.add(token_ids[eos_token])
    value = read_json(folder / GENERATION_FILE).get("eos_token_id")
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise TokenizerError(
                f"{folder / GENERATION_FILE}: eos_token_id must be in 0..{vocab_size - 1}, got {token_id!r}"
            )
        ends.add(token_id)
    return frozenset(ends)
