"""tokenizer.json files: what is accepted, what is refused, and which added tokens are control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tokenizer.kimi_vocabulary import NUM_RANKS, SPECIAL_IDS, VOCAB_SIZE

from deltafold.errors import TokenizerError
from deltafold.tokenizer.tokenizer import Tokenizer

Change = Callable[[dict[str, Any]], object]


def _changed(json_folder: Path, tmp_path: Path, change: Change, *, config: dict[str, Any] | None = None) -> Path:
    """A folder with the converted file, changed, and no tables beside it but `config`."""
    content = json.loads((json_folder / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def _add(token_id: int, content: str, **flags: object) -> Change:
    entry = {"id": token_id, "content": content, "normalized": False, "special": False, **_NO_FLAGS, **flags}
    return lambda file: file["added_tokens"].append(entry)


_NO_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False}
NEXT_ID = NUM_RANKS + 256


def test_the_file_alone_has_the_special_tokens(json_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(_changed(json_folder, tmp_path, lambda _: None), vocab_size=VOCAB_SIZE)
    assert tokenizer.special_tokens.items() >= SPECIAL_IDS.items()
    assert tokenizer.end_token_ids == {SPECIAL_IDS["[EOS]"], SPECIAL_IDS["<|im_end|>"]}


def test_added_marks_are_control_tokens_and_added_letters_are_text(json_folder: Path, tmp_path: Path) -> None:
    def change(file: dict[str, Any]) -> None:
        _add(NEXT_ID, "<think>")(file)
        _add(NEXT_ID + 1, "Grüße")(file)

    tokenizer = Tokenizer.from_folder(_changed(json_folder, tmp_path, change), vocab_size=VOCAB_SIZE)
    assert tokenizer.special_tokens["<think>"] == NEXT_ID
    token_ids = tokenizer.encode("Grüße <think>")
    assert token_ids[0] == NEXT_ID + 1
    assert NEXT_ID not in token_ids
    assert NEXT_ID not in tokenizer.encode("\0<think>")  # the name it is hidden under is no way in either
    assert tokenizer.decode([NEXT_ID, NEXT_ID + 1]) == "<think>Grüße"


def test_a_control_token_in_the_merges_vocabulary_is_not_found_whole(json_folder: Path, tmp_path: Path) -> None:
    """With whole pieces looked up, a word of the vocabulary that is a control token would be found in any text."""

    def change(file: dict[str, Any]) -> None:
        file["model"]["vocab"]["Secret"] = NUM_RANKS
        file["added_tokens"][0] = {
            "id": NUM_RANKS,
            "content": "Secret",
            "special": True,
            "normalized": False,
            **_NO_FLAGS,
        }

    tokenizer = Tokenizer.from_folder(_changed(json_folder, tmp_path, change), vocab_size=VOCAB_SIZE)
    assert tokenizer.special_tokens["Secret"] == NUM_RANKS
    assert NUM_RANKS not in tokenizer.encode("Secret")
    assert tokenizer.decode(tokenizer.encode("Secret")) == "Secret"


def test_padding_and_truncation_of_the_file_do_not_apply(json_folder: Path, tmp_path: Path) -> None:
    def change(file: dict[str, Any]) -> None:
        file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        file["padding"] = {
            "strategy": {"Fixed": 40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        }

    tokenizer = Tokenizer.from_folder(_changed(json_folder, tmp_path, change), vocab_size=VOCAB_SIZE)
    text = "one two three four five six"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _set(*path: str | int, value: object) -> Change:
    def change(file: Any) -> None:
        for key in path[:-1]:
            file = file[key]
        file[path[-1]] = value

    return change


def _only_word(token_id: int) -> Change:
    def change(file: dict[str, Any]) -> None:
        file["added_tokens"] = []
        file["model"]["vocab"]["zzzz"] = token_id

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("model", "type", value="Unigram"), "the model must be BPE with a vocab, got Unigram"),
        (_set("model", value=None), "the model must be BPE with a vocab, got None"),
        (_set("decoder", value={"type": "Metaspace"}), "the decoder must be ByteLevel, got .*Metaspace"),
        (_set("decoder", value=None), "the decoder must be ByteLevel, got None"),
        (
            _set("decoder", value={"type": "Sequence", "decoders": [{"type": "Fuse"}]}),
            "the decoder must be ByteLevel, got .*Fuse",
        ),
        (_set("added_tokens", value={"a": 1}), "added_tokens must be a list"),
        (_set("added_tokens", 3, value={"content": "[X]"}), "has an entry without an id"),
        (_set("added_tokens", 3, "rstrip", value=True), f"token {NUM_RANKS + 3} '<.im_user.>' sets rstrip"),
        (_set("added_tokens", 3, "content", value="[EOS]"), rf"token {NUM_RANKS + 3} '\[EOS\]' collides with token"),
        (_set("added_tokens", 255, "id", value=VOCAB_SIZE + 5), "has id .*, but comes out as"),
        (_only_word(VOCAB_SIZE), f"token {VOCAB_SIZE} 'zzzz' is beyond the vocabulary"),
        (_only_word(NUM_RANKS - 1), f"token {NUM_RANKS - 1} is given twice"),
        (_set("model", "merges", value=[["q", "zq"]]), "tokenizer.json is no tokenizer"),
    ],
)
def test_bad_files_are_named(json_folder: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(_changed(json_folder, tmp_path, change), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({str(NEXT_ID): {"content": "<new>"}}, f"token {NEXT_ID} .* is not an added token of tokenizer.json"),
        ({str(NUM_RANKS): {"content": "<other>"}}, f"token {NUM_RANKS} '<other>' collides with token"),
    ],
)
def test_a_config_that_contradicts_the_file_is_named(
    json_folder: Path, tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    folder = _changed(json_folder, tmp_path, lambda _: None, config={"added_tokens_decoder": entry})
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder, vocab_size=VOCAB_SIZE)
