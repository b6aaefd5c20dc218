"""Ranks: reading, Kimi's cuts, and the conversion to tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.kimi_vocabulary import NUM_RANKS, SPECIAL_IDS, VOCAB_SIZE, ranks_file, write_kimi_folder

from deltafold.errors import TokenizerError
from deltafold.tokenizer import convert_tokenizer
from deltafold.tokenizer import tiktoken as ranks_module
from deltafold.tokenizer.tiktoken import SPLIT_PATTERN, cut_text, read_ranks
from deltafold.tokenizer.tokenizer import Tokenizer


def slow_cut(text: str, max_chunk: int, max_run: int) -> list[str]:
    """The rule one character at a time: how long has the run gone on, and did it just pass the limit?"""
    parts: list[str] = []
    for start in range(0, len(text), max_chunk):
        part, run, was_space = "", 0, None
        for char in text[start : start + max_chunk]:
            run = run + 1 if char.isspace() == was_space else 1
            was_space = char.isspace()
            if run > max_run:
                parts.append(part)
                part, run = "", 1
            part += char
        parts.append(part)
    return parts


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab \n\x1c\u00a0\u3000", max_size=80), max_chunk=st.integers(1, 30), max_run=st.integers(1, 8))
def test_cuts_equal_the_slow_rule(text: str, max_chunk: int, max_run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "MAX_CHUNK_CHARS", max_chunk)
        patch.setattr(ranks_module, "MAX_RUN_CHARS", max_run)
        assert list(cut_text(text)) == slow_cut(text, max_chunk, max_run)


RUN = 25_000
BORDER_TEXTS = [
    "b" + "a" * (RUN - 2),
    "b" + "a" * (RUN - 1),
    "b" + "a" * RUN,
    "b" + "a" * (2 * RUN + 3),
    "x\n" + " " * (RUN + 5) + "y",
    ("the river said " * 30_000)[: 400_000 - 3] + "river said",
    "the " * 99_999 + "a" * (RUN + 10),
]


@pytest.mark.parametrize("text", BORDER_TEXTS, ids=range(len(BORDER_TEXTS)))
def test_ids_at_the_cuts(kimi: Tokenizer, ranks: list[bytes], text: str) -> None:
    encoding = tiktoken.Encoding(
        "plain",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={},
    )
    parts = slow_cut(text, 400_000, RUN)
    expected = [token_id for part in parts for token_id in encoding.encode_ordinary(part)]
    assert kimi.encode(text) == expected
    if len(text) > RUN:
        assert len(parts) > 1
        assert expected != encoding.encode_ordinary(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("HTTPServer don't CAN'T", ["HTTPServer", " don't", " CAN'T"]),
        ("camelCase", ["camel", "Case"]),
        ("12345 67", ["123", "45", " ", "67"]),
        ("a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
        ("x = {};\n", ["x", " =", " {};\n"]),
    ],
)
def test_the_split_pattern(text: str, pieces: list[str]) -> None:
    """Every piece is one token here, so the ids tell where the text was split."""
    vocabulary = [bytes((byte,)) for byte in range(256)] + [piece.encode() for piece in pieces if len(piece) > 1]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(vocabulary))}
    encoding = tiktoken.Encoding("pieces", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert [encoding.decode([token_id]) for token_id in encoding.encode_ordinary(text)] == pieces


LINES = ranks_file([bytes((byte,)) for byte in range(256)]).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, b"YWI= 257\n"], r"rank 256 is missing \(line 257 has rank 257\)"),
        ([*LINES, b"YWI= 255\n"], "line 257: rank 255 is already on line 256"),
        ([*LINES, b"YQ== 256\n"], r"line 257: token b'a' \(rank 256\) is already on line 98"),
        ([*LINES[:97], b"YWI= 97\n", *LINES[98:]], "the single byte 0x61 has no rank"),
        ([*LINES, b"Y!!I= 256\n"], "line 257: b'Y!!I=' is not base64"),
        ([*LINES, b"YWI 256\n"], "line 257: b'YWI' is not base64"),
        ([*LINES, b"YWI= -1\n"], "line 257: the rank must be a number from 0, got b'-1'"),
        ([*LINES, b"YWI=\n"], "line 257: expected a base64 token and its rank, got b'YWI='"),
        ([*LINES, b"YWI= 256 1\n"], "line 257: expected a base64 token"),
        ([], "the single byte 0x00 has no rank"),
    ],
)
def test_malformed_ranks_are_named(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(lines))
    with pytest.raises(TokenizerError, match=message):
        read_ranks(path)


def test_ranks_may_come_in_any_order(tmp_path: Path, ranks: list[bytes]) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join(reversed(ranks_file(ranks).splitlines())))
    assert read_ranks(path) == ranks


def test_conversion_is_verified_and_reported(kimi_folder: Path, tmp_path: Path, ranks: list[bytes]) -> None:
    output = tmp_path / "out.json"
    report = convert_tokenizer(kimi_folder, output)
    assert report.output == output
    assert report.num_ranks == NUM_RANKS
    assert report.num_special_tokens == 256
    assert report.num_verified_ids == NUM_RANKS + 256
    assert report.num_verified_texts > 2000
    assert str(report.num_verified_tokens) in str(report)
    assert list(tmp_path.iterdir()) == [output]
    third_party = tokenizers.Tokenizer.from_file(str(output))
    text = "[BOS]the river<|im_end|> 小河"
    assert third_party.encode(text).ids[:1] == [SPECIAL_IDS["[BOS]"]]
    assert third_party.decode(third_party.encode(text).ids, skip_special_tokens=False) == text


def test_a_wrong_conversion_is_caught_and_leaves_no_file(
    kimi_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ranks_module._tokenizer_json

    def without_a_merge(*args: object) -> dict[str, object]:
        content = right(*args)  # type: ignore[arg-type]
        content["model"]["ignore_merges"] = False
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != "in"]
        return content

    def with_other_pattern(*args: object) -> dict[str, object]:
        content = right(*args)  # type: ignore[arg-type]
        split = content["pre_tokenizer"]["pretokenizers"][0]
        split["pattern"]["Regex"] = SPLIT_PATTERN.replace(r"\s+(?!\S)|", "")
        return content

    def with_swapped_ids(*args: object) -> dict[str, object]:
        content = right(*args)  # type: ignore[arg-type]
        vocab = content["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
        return content

    for wrong, message in (
        (without_a_merge, r"conversion differs on .*tiktoken gives .* the result"),
        (with_other_pattern, r"conversion differs on .*tiktoken gives .* the result"),
        (with_swapped_ids, "conversion differs at id .*: tiktoken has b'.*', the result b'"),
    ):
        monkeypatch.setattr(ranks_module, "_tokenizer_json", wrong)
        with pytest.raises(TokenizerError, match=message):
            convert_tokenizer(kimi_folder, tmp_path / "out.json")
        assert not list(tmp_path.iterdir())


def test_letters_are_split_from_han_characters(kimi_folder: Path, ranks: list[bytes], tmp_path: Path) -> None:
    """A token across the border must not be found, and a pattern that lets it be found must be caught."""
    han = "线".encode()
    write_kimi_folder(tmp_path / "model", [*ranks, han[:2], han, b"i" + han])
    config = (tmp_path / "model" / "tokenizer_config.json").read_text()
    for token_id in sorted(SPECIAL_IDS.values(), reverse=True):
        config = config.replace(f'"{token_id}"', f'"{token_id + 3}"')
    (tmp_path / "model" / "tokenizer_config.json").write_text(config)
    convert_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer.from_folder(tmp_path / "model", vocab_size=VOCAB_SIZE + 3)
    assert tokenizer.encode("i线") == [*tokenizer.encode("i"), NUM_RANKS + 1]
    with pytest.MonkeyPatch.context() as patch:
        right = ranks_module._tokenizer_json
        patch.setattr(
            ranks_module,
            "_tokenizer_json",
            lambda *args: json.loads(json.dumps(right(*args)).replace(r"&&[^\\p{Han}]", "")),
        )
        with pytest.raises(TokenizerError, match=r"conversion differs on .*tiktoken gives"):
            convert_tokenizer(tmp_path / "model")


def test_tokens_without_merges_are_found_whole(tmp_path: Path) -> None:
    """tiktoken looks a piece up before it merges, so it finds tokens that no pair makes; so must the conversion."""
    tokens = [bytes((byte,)) for byte in range(256)] + [b"river", b" the", "河".encode()]
    write_kimi_folder(tmp_path / "model", tokens)
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(len(tokens) + 1): {"content": "[EOS]"}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "generation_config.json").unlink()
    convert_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer.from_folder(tmp_path / "model", vocab_size=len(tokens) + 256)
    assert tokenizer.encode("river the") == [256, 257]


def test_a_name_of_a_reserved_id_is_refused(kimi_copy: Path) -> None:
    config = json.loads((kimi_copy / "tokenizer_config.json").read_text())
    taken = f"<|reserved_token_{NUM_RANKS + 5}|>"
    config["added_tokens_decoder"][str(NUM_RANKS + 20)] = {"content": taken}
    (kimi_copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="take the names of other, unnamed reserved ids"):
        convert_tokenizer(kimi_copy)


def test_output_that_cannot_be_written_is_named(
    kimi_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "verification_texts", lambda names: ["short"])
    with pytest.raises(TokenizerError, match=r"cannot write .*nowhere"):
        convert_tokenizer(kimi_folder, tmp_path / "nowhere" / "tokenizer.json")


def test_cuts_stay_where_the_ranks_lie_beside_the_conversion(
    kimi_folder: Path, json_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(kimi_folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(json_folder / "tokenizer.json", tmp_path)
    text = "b" + "a" * (RUN + 3)
    both, ranks_only, json_only = (
        Tokenizer.from_folder(folder, vocab_size=VOCAB_SIZE).encode(text)
        for folder in (tmp_path, kimi_folder, json_folder)
    )
    assert both == ranks_only != json_only
