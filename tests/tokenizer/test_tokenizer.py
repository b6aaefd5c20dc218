"""Text to ids and back, for both file formats (faults 37, 38)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.kimi_vocabulary import NUM_RANKS, SPECIAL_IDS, VOCAB_SIZE

from deltafold.errors import InvalidTokenError, RequestError, TokenizerError
from deltafold.tokenizer.tokenizer import Tokenizer

TEXT = st.text(st.characters(codec="utf-8"), max_size=60)
SPECIAL_TEXT = st.lists(st.sampled_from([*SPECIAL_IDS, "a", " ", "\n", "<|im_", "end|>", "["]), max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=TEXT | SPECIAL_TEXT)
def test_any_text_comes_back_and_is_no_control_token(kimi: Tokenizer, converted: Tokenizer, text: str) -> None:
    token_ids = kimi.encode(text)
    assert converted.encode(text) == token_ids
    assert all(token_id < NUM_RANKS for token_id in token_ids)
    assert kimi.decode(token_ids) == text
    assert converted.decode(token_ids) == text


def test_merges_are_used(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("the river said")) < len("the river said") / 2


def test_every_id_decodes_and_reserved_ids_have_a_name(tokenizer: Tokenizer, ranks: list[bytes]) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_tokens.items() >= SPECIAL_IDS.items()
    for token_id, token in enumerate(ranks):
        assert tokenizer.token_bytes(token_id) == token
        assert tokenizer.decode([token_id]) == token.decode("utf-8", "replace")
    named = {token_id: name for name, token_id in SPECIAL_IDS.items()}
    for token_id in range(NUM_RANKS, VOCAB_SIZE):
        name = named.get(token_id, f"<|reserved_token_{token_id}|>")
        assert tokenizer.token_bytes(token_id) == name.encode()
        assert tokenizer.decode([token_id], skip_special_tokens=False) == name
        assert tokenizer.decode([token_id]) == (name if name.startswith("<|tool_call") else "")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**9, True, 1.0, "1"])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    for attempt in (
        lambda: tokenizer.decode([0, token_id]),
        lambda: tokenizer.decode([token_id], skip_special_tokens=False),
        lambda: tokenizer.token_bytes(token_id),
        lambda: tokenizer.detokenizer().push(token_id),
    ):
        with pytest.raises(InvalidTokenError, match=rf"0\.\.{VOCAB_SIZE - 1}, got {token_id!r}"):
            attempt()


@pytest.mark.parametrize("text", [b"bytes", None, 3, "half \ud83d of a pair"])
def test_only_text_is_encoded(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=r"must be a string, got|lone surrogate U\+D83D at character 5"):
        tokenizer.encode(text)


def test_both_end_tokens_stop_and_neither_is_text(tokenizer: Tokenizer) -> None:
    ends = {SPECIAL_IDS["[EOS]"], SPECIAL_IDS["<|im_end|>"]}
    assert tokenizer.end_token_ids == ends
    for end in ends:
        detokenizer = tokenizer.detokenizer()
        text = "".join(detokenizer.push(token_id) for token_id in [*tokenizer.encode("done."), end])
        assert text + detokenizer.flush() == "done."


def _rewrite(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in {**content, **values}.items() if value is not None}))


def test_end_tokens_come_from_every_source(kimi_copy: Path) -> None:
    _rewrite(kimi_copy / "tokenizer_config.json", eos_token={"content": "[EOT]"})
    _rewrite(kimi_copy / "generation_config.json", eos_token_id=[SPECIAL_IDS["[PAD]"], 5])
    tokenizer = Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE)
    assert tokenizer.end_token_ids == {5, *(SPECIAL_IDS[name] for name in ("[EOT]", "[PAD]", "[EOS]", "<|im_end|>"))}
    assert tokenizer.decode([5]) == ""
    (kimi_copy / "generation_config.json").unlink()
    tokenizer = Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE)
    assert tokenizer.end_token_ids == {SPECIAL_IDS[name] for name in ("[EOT]", "[EOS]", "<|im_end|>")}


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}, "eos_token '<nowhere>' is not in the vocabulary"),
        ("tokenizer_config.json", {"eos_token": 7}, "eos_token must be a string, got 7"),
        ("generation_config.json", {"eos_token_id": VOCAB_SIZE}, f"eos_token_id must be in 0..{VOCAB_SIZE - 1}, got"),
        ("generation_config.json", {"eos_token_id": ["2"]}, "eos_token_id must be in .* got '2'"),
        ("tokenizer_config.json", {"added_tokens_decoder": None}, "has no added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, r"must be an object, got \[1\]"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "[BOS]"}}}, "the key 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"600": {}}}, "token 600 has no content string"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"600": {"content": "[B]", "lstrip": True}}},
            r"token 600 '\[B\]' sets lstrip",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"600": {"content": "[B]"}, "601": {"content": "[B]"}}},
            r"token 601 '\[B\]' collides with token 600",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {str(NUM_RANKS - 1): {"content": "[B]"}}},
            rf"token {NUM_RANKS - 1} '\[B\]' collides with the ranks 0..{NUM_RANKS - 1}",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {str(VOCAB_SIZE): {"content": "[B]"}}},
            rf"token {VOCAB_SIZE} '\[B\]' is beyond the vocabulary of {VOCAB_SIZE} ids",
        ),
    ],
)
def test_bad_tables_are_named(kimi_copy: Path, file: str, values: dict[str, object], message: str) -> None:
    _rewrite(kimi_copy / file, **values)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE)


def test_unreadable_json_is_named(kimi_copy: Path) -> None:
    for text, message in (("{", "not readable JSON"), ("[]", "must hold a JSON object, got list")):
        (kimi_copy / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=rf"tokenizer_config.json .*{message}"):
            Tokenizer.from_folder(kimi_copy, vocab_size=VOCAB_SIZE)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has neither tokenizer\.json nor tiktoken\.model"):
        Tokenizer.from_folder(tmp_path, vocab_size=VOCAB_SIZE)


def test_more_ranks_than_rows_are_refused(kimi_folder: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"has {NUM_RANKS} ranks, the model's vocabulary 100"):
        Tokenizer.from_folder(kimi_folder, vocab_size=100)
