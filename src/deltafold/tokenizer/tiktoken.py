"""tiktoken ranks with Kimi's split pattern and cuts: reading them, encoding with them, tokenizer.json from them.

`vocabulary.py` adds the special tokens; `verification.py` has the texts a conversion is checked on.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

from deltafold.errors import TokenizerError
from deltafold.tokenizer import special_tokens
from deltafold.tokenizer.byte_level import byte_level_text, text_bytes
from deltafold.tokenizer.special_tokens import SpecialTokens
from deltafold.tokenizer.verification import verification_texts

RANKS_FILE = "tiktoken.model"
JSON_FILE = "tokenizer.json"
NUM_RESERVED_TOKENS = 256
"""Ids behind the ranks that Kimi's format keeps for special tokens, named or not."""

MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Kimi's format constant: where text is split before merging. tiktoken's engine and the one of `tokenizers` read
it alike, class intersection and inline case folding included (`convert` verifies that they do)."""

_RUNS = re.compile(r"\s+|\S+")


def reserved_name(token_id: int) -> str:
    """The printable name of an id the checkpoint does not name (the one Kimi's own wrapper gives it)."""
    return f"<|reserved_token_{token_id}|>"


def cut_text(text: str) -> Iterator[str]:
    """Cut where Kimi's wrapper cuts before merging, which changes ids.

    Every `MAX_CHUNK_CHARS` characters, and inside such a chunk wherever a run of space or of non-space characters
    has gone on for `MAX_RUN_CHARS`; a run is counted from its own start or the chunk's.
    """
    for chunk_start in range(0, len(text), MAX_CHUNK_CHARS):
        chunk = text[chunk_start : chunk_start + MAX_CHUNK_CHARS]
        start = 0
        if len(chunk) > MAX_RUN_CHARS:
            for run in _RUNS.finditer(chunk):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield chunk[start:cut]
                    start = cut
        yield chunk[start:]


def _parse_line(where: str, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise TokenizerError(f"{where}: expected a base64 token and its rank, got {line[:80]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(f"{where}: {fields[0][:80]!r} is not base64: {error}") from error
    if not fields[1].isdigit():
        raise TokenizerError(f"{where}: the rank must be a number from 0, got {fields[1][:80]!r}")
    if not token:
        raise TokenizerError(f"{where}: rank {int(fields[1])} has an empty token")
    return token, int(fields[1])


def read_ranks(path: Path) -> list[bytes]:
    """Tokens by rank (list index = token id).

    Raises:
        TokenizerError: naming the line and the value of what is malformed, given twice, or missing.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    line_of_rank: dict[int, int] = {}
    line_of_token: dict[bytes, int] = {}
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        token, rank = _parse_line(where, line)
        if rank in line_of_rank:
            raise TokenizerError(f"{where}: rank {rank} is already on line {line_of_rank[rank]}")
        if token in line_of_token:
            raise TokenizerError(f"{where}: token {token!r} (rank {rank}) is already on line {line_of_token[token]}")
        line_of_rank[rank] = line_of_token[token] = number
        tokens[rank] = token
    for rank, other in enumerate(sorted(tokens)):
        if rank != other:
            raise TokenizerError(f"{path}: rank {rank} is missing (line {line_of_rank[other]} has rank {other})")
    for byte in range(256):
        if bytes((byte,)) not in line_of_token:
            raise TokenizerError(f"{path}: the single byte 0x{byte:02x} has no rank, so not every text can be encoded")
    return [tokens[rank] for rank in range(len(tokens))]


def read_special_tokens(folder: Path, *, num_ranks: int, vocab_size: int) -> SpecialTokens:
    """The checkpoint's own table, which must lie behind the ranks and inside the vocabulary.

    Raises:
        TokenizerError: no table, or an id outside `num_ranks .. vocab_size - 1`.
    """
    where = str(folder / special_tokens.CONFIG_FILE)
    if num_ranks > vocab_size:
        raise TokenizerError(f"{folder / RANKS_FILE} has {num_ranks} ranks, the model's vocabulary {vocab_size}")
    table = special_tokens.collect(where, special_tokens.read_added_tokens(folder))
    if not table.ids:
        raise TokenizerError(f"{where} is missing or has no added_tokens_decoder, so the special tokens are unknown")
    for name, token_id in table.ids.items():
        if token_id < num_ranks:
            raise TokenizerError(f"{where}: token {token_id} {name!r} collides with the ranks 0..{num_ranks - 1}")
        if token_id >= vocab_size:
            raise TokenizerError(f"{where}: token {token_id} {name!r} is beyond the vocabulary of {vocab_size} ids")
    return table


class TiktokenEncoder:
    """Ordinary text to ids by ranks. `tokens` are the byte strings by rank."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        # The encoding gets no special tokens: what it does not know it cannot yield.
        self._encoding = tiktoken.Encoding("ranks", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> list[int]:
        return [token_id for part in cut_text(text) for token_id in self._encoding.encode_ordinary(part)]


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert` wrote and what it compared."""

    output: Path
    num_ranks: int
    num_merges: int
    num_special_tokens: int
    num_verified_ids: int
    num_verified_texts: int
    num_verified_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.output}: {self.num_ranks} ranks, {self.num_merges} merges, "
            f"{self.num_special_tokens} special tokens; "
            f"{self.num_verified_ids} ids and {self.num_verified_texts} texts ({self.num_verified_tokens} tokens) "
            "are equal to tiktoken's"
        )


def _merges(tokens: Sequence[bytes]) -> list[tuple[str, str]]:
    """Every way a token splits into two tokens, by the rank of what it makes.

    tiktoken merges any neighbours whose concatenation has a rank, so one recovered pair per token is not enough.
    Of equal results the longer left part comes first, as tiktoken's leftmost match does on runs of one character.
    """
    known = set(tokens)
    return [
        (byte_level_text(token[:cut]), byte_level_text(token[cut:]))
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _added_token(token_id: int, name: str, *, is_hidden: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, **flags, "special": is_hidden}


def _tokenizer_json(tokens: Sequence[bytes], names: Mapping[int, str], hidden: frozenset[int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # tiktoken looks a whole piece up before it merges anything.
        "ignore_merges": True,
        "vocab": {byte_level_text(token): rank for rank, token in enumerate(tokens)},
        "merges": _merges(tokens),
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(token_id, name, is_hidden=token_id in hidden) for token_id, name in sorted(names.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _token_names(table: SpecialTokens, num_ranks: int) -> dict[int, str]:
    named = {token_id: name for name, token_id in table.ids.items()}
    names = {
        token_id: named.get(token_id, reserved_name(token_id))
        for token_id in range(num_ranks, num_ranks + NUM_RESERVED_TOKENS)
    }
    if len(set(names.values())) != len(names):
        twice = sorted(set(table.ids) & {reserved_name(token_id) for token_id in names if token_id not in named})
        raise TokenizerError(f"special tokens take the names of other, unnamed reserved ids: {twice}")
    return names


def _verify_ids(converted: tokenizers.Tokenizer, tokens: Sequence[bytes], names: Mapping[int, str]) -> None:
    expected = [*tokens, *(names[token_id].encode() for token_id in sorted(names))]
    if converted.get_vocab_size() != len(expected):
        raise TokenizerError(f"conversion has {converted.get_vocab_size()} ids, tiktoken {len(expected)}")
    for token_id, token in enumerate(expected):
        text = converted.id_to_token(token_id)
        found = None if text is None else text.encode() if token_id in names else text_bytes(text)
        if found != token:
            raise TokenizerError(f"conversion differs at id {token_id}: tiktoken has {token!r}, the result {found!r}")


def _verify_texts(
    converted: tokenizers.Tokenizer, encoding: tiktoken.Encoding, names: Mapping[int, str]
) -> tuple[int, int]:
    num_texts = num_tokens = 0
    for text in verification_texts(tuple(names.values())):
        expected = encoding.encode(text, allowed_special="all")
        found = converted.encode(text, add_special_tokens=False).ids
        if found != expected:
            raise TokenizerError(f"conversion differs on {text!r}: tiktoken gives {expected}, the result {found}")
        num_texts += 1
        num_tokens += len(expected)
    return num_texts, num_tokens


def _write(output: Path, text: str) -> None:
    partial = output.with_name(output.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TokenizerError(f"cannot write {output}: {error}") from error


def convert(folder: str | Path, output: str | Path | None = None) -> ConversionReport:
    """Make a tokenizer.json equal to the folder's tiktoken.model, verify it, and only then write it to `output`
    (tokenizer.json in the folder if None).

    Every id's bytes and the ids of a mixed corpus are compared with tiktoken itself. The file cannot express the
    cuts of `cut_text`; `Tokenizer` applies them wherever tiktoken.model lies in the folder too.

    Raises:
        TokenizerError: malformed input, an `output` that cannot be written, or the first text whose ids differ
            (with both); then nothing was written.
    """
    folder = Path(folder)
    output = folder / JSON_FILE if output is None else Path(output)
    if output.is_dir():
        raise TokenizerError(f"{output} cannot be written: it is a folder")
    tokens = read_ranks(folder / RANKS_FILE)
    table = read_special_tokens(folder, num_ranks=len(tokens), vocab_size=len(tokens) + NUM_RESERVED_TOKENS)
    names = _token_names(table, len(tokens))
    hidden = table.hidden | (names.keys() - table.ids.values())
    content = _tokenizer_json(tokens, names, hidden)
    serialized = json.dumps(content, ensure_ascii=False, indent=1)
    converted = tokenizers.Tokenizer.from_str(serialized)
    encoding = tiktoken.Encoding(
        "source",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={name: token_id for token_id, name in names.items()},
    )
    _verify_ids(converted, tokens, names)
    num_texts, num_tokens = _verify_texts(converted, encoding, names)
    _write(output, serialized)
    return ConversionReport(
        output=output,
        num_ranks=len(tokens),
        num_merges=len(content["model"]["merges"]),
        num_special_tokens=len(names),
        num_verified_ids=len(tokens) + len(names),
        num_verified_texts=num_texts,
        num_verified_tokens=num_tokens,
    )
