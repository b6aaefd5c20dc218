"""A checkpoint's vocabulary: tokenizer.json through `tokenizers`, else tiktoken.model through `tiktoken`.

Both kinds end in the same `Vocabulary`, so `tokenizer.py` and `detokenizer.py` know no kinds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from deltafold.errors import TokenizerError
from deltafold.tokenizer import special_tokens, tiktoken
from deltafold.tokenizer.byte_level import text_bytes
from deltafold.tokenizer.special_tokens import SpecialTokens

# Not in the byte-level alphabet: a model entry that begins with it can never be the result of encoding text.
_UNREACHABLE = "\0"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`encode` turns ordinary text into ids and never yields a control token. `tokens` are the bytes of every id
    of the model; `special.hidden` includes the ids nobody named. `token_ids` are the names a config may use.
    `is_kimi`: the checkpoint ships tiktoken.model, so its wrapper's habits are part of its format."""

    encode: Callable[[str], list[int]]
    tokens: tuple[bytes, ...]
    special: SpecialTokens
    token_ids: Mapping[str, int]
    is_kimi: bool


def read_vocabulary(folder: Path, *, vocab_size: int) -> Vocabulary:
    """Read the folder's tokenizer.json, or its tiktoken.model. `vocab_size`: the model's embedding rows.

    Raises:
        TokenizerError: neither file is there, or one is malformed or does not fit `vocab_size`.
    """
    if (folder / tiktoken.JSON_FILE).is_file():
        return _from_json(folder, vocab_size)
    if (folder / tiktoken.RANKS_FILE).is_file():
        return _from_ranks(folder, vocab_size)
    raise TokenizerError(f"{folder} has neither {tiktoken.JSON_FILE} nor {tiktoken.RANKS_FILE}")


def _complete(
    known: Mapping[int, bytes], table: SpecialTokens, vocab_size: int
) -> tuple[tuple[bytes, ...], SpecialTokens]:
    """Names for the ids that have none, so that whatever a model emits can be decoded."""
    unnamed = [token_id for token_id in range(vocab_size) if token_id not in known]
    names = {token_id: tiktoken.reserved_name(token_id).encode() for token_id in unnamed}
    tokens = tuple(known[token_id] if token_id in known else names[token_id] for token_id in range(vocab_size))
    return tokens, SpecialTokens(table.ids, table.hidden.union(unnamed))


def _from_ranks(folder: Path, vocab_size: int) -> Vocabulary:
    ranks = tiktoken.read_ranks(folder / tiktoken.RANKS_FILE)
    table = tiktoken.read_special_tokens(folder, num_ranks=len(ranks), vocab_size=vocab_size)
    known = dict(enumerate(ranks)) | {token_id: name.encode() for name, token_id in table.ids.items()}
    tokens, special = _complete(known, table, vocab_size)
    return Vocabulary(tiktoken.TiktokenEncoder(ranks).encode, tokens, special, special.ids, is_kimi=True)


def _check_byte_level(path: Path, content: Mapping[str, Any]) -> None:
    model, decoder = content.get("model"), content.get("decoder")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TokenizerError(f"{path}: the model must be BPE with a vocab, got {_type_of(model)}")
    steps = decoder.get("decoders") if isinstance(decoder, Mapping) and decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list) or [_type_of(step) for step in steps] != ["ByteLevel"]:
        raise TokenizerError(f"{path}: the decoder must be ByteLevel, got {decoder!r}")


def _type_of(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else part


def _added_entries(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = content.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(f"{path}: added_tokens must be a list, got {entries!r}")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), int) or entry["id"] < 0:
            raise TokenizerError(f"{path}: added_tokens has an entry without an id: {entry!r}")
    return entries


def _is_control(entry: Mapping[str, Any]) -> bool:
    """Added tokens that are not flagged special are control tokens too if they look like marks (`<tool_call>`);
    the rest (DeepSeek adds single letters) are ordinary text."""
    name = str(entry.get("content"))
    return entry.get("special") is True or (len(name) > 2 and name[0] in "<[" and name[-1] in ">]")


def _hide_control_tokens(content: dict[str, Any], names: frozenset[str]) -> None:
    """Rename control tokens so that no text can yield one. They stay in place, since `tokenizers` numbers the
    added tokens by their order."""
    for entry in content["added_tokens"]:
        if entry["content"] in names:
            entry.update(content=_UNREACHABLE + entry["content"], special=True, normalized=False)
    vocab = content["model"]["vocab"]
    for name in names & vocab.keys():
        vocab[_UNREACHABLE + name] = vocab.pop(name)


def _ordinary_tokenizer(path: Path, content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the binding raises nothing narrower
        raise TokenizerError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    for entry in content["added_tokens"]:
        if (found := tokenizer.token_to_id(entry["content"])) != entry["id"]:
            name = entry["content"].removeprefix(_UNREACHABLE)
            raise TokenizerError(f"{path}: added token {name!r} has id {entry['id']}, but comes out as {found}")
    return tokenizer


def _json_encoder(tokenizer: tokenizers.Tokenizer, *, is_cut: bool) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        parts: Sequence[str] = list(tiktoken.cut_text(text)) if is_cut else [text]
        return [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False).ids]

    return encode


def _from_json(folder: Path, vocab_size: int) -> Vocabulary:
    path = folder / tiktoken.JSON_FILE
    content = special_tokens.read_json(path)
    _check_byte_level(path, content)
    entries = content["added_tokens"] = _added_entries(path, content)
    listed = [(entry["id"], dict(entry)) for entry in entries if _is_control(entry)]
    added = {entry["id"]: str(entry.get("content")).encode() for entry in entries}
    table = special_tokens.collect(f"{folder}", [*listed, *_from_config(folder, added)])
    _hide_control_tokens(content, frozenset(name for name, token_id in table.ids.items() if token_id in added))
    tokenizer = _ordinary_tokenizer(path, content)
    known: dict[int, bytes] = {}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            raise TokenizerError(f"{path}: token {token_id} {text!r} is beyond the vocabulary of {vocab_size} ids")
        if token_id in known:
            raise TokenizerError(f"{path}: token {token_id} is given twice, the second time as {text!r}")
        known[token_id] = added.get(token_id) or text_bytes(text) or text.encode()
    tokens, special = _complete(known, table, vocab_size)
    token_ids = {**tokenizer.get_vocab(with_added_tokens=False), **special.ids}
    is_kimi = (folder / tiktoken.RANKS_FILE).is_file()
    return Vocabulary(_json_encoder(tokenizer, is_cut=is_kimi), tokens, special, token_ids, is_kimi)


def _from_config(folder: Path, added: Mapping[int, bytes]) -> list[tuple[int, object]]:
    """tokenizer_config.json repeats the table; what it says of a token must agree, and it can add no new ids."""
    entries = []
    for token_id, entry in special_tokens.read_added_tokens(folder):
        if token_id not in added:
            path = folder / special_tokens.CONFIG_FILE
            raise TokenizerError(f"{path}: token {token_id} {entry!r} is not an added token of {tiktoken.JSON_FILE}")
        if not isinstance(entry, Mapping) or _is_control(entry):
            entries.append((token_id, entry))
    return entries
