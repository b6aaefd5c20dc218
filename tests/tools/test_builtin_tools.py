"""The tools that make the built-in model: split, duplicate guard, n-gram, chat form against the shipped template."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.builtin_model import chat, data, evaluate, sources, tokenizer  # noqa: E402

BUILTIN = ROOT / "src/deltafold/builtin"


def test_ngram_is_normalised() -> None:
    """Over all 256 next bytes the probabilities sum to one, after known and unknown contexts alike."""
    model = evaluate.ByteNgram(b"in the beginning was the word, and the word was with the end of the world", order=3)
    for context in (b"the w", b"zzzzz", b"he wo", b"\x00\xff"):
        total = sum(model.probabilities(context + bytes([byte]))[-1] for byte in range(256))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_ngram_matches_counts_by_hand() -> None:
    model = evaluate.ByteNgram(b"abab", order=1)
    # order 0: a and b twice each of 4, 2 types: (2 + 2/256) / 6; after a: b twice, 1 type.
    p0 = (2 + 2 / 256) / 6
    assert model.probabilities(b"ab").tolist() == pytest.approx([p0, (2 + p0) / 3])


def test_split_is_contiguous_disjoint_and_complete() -> None:
    documents = [sources.Document("mhcc", f"c{n}", f"text {n} " * 900) for n in range(200)]
    splits = data.split({"mhcc": documents}, seed=1)
    units = {name: [d.unit for d in part] for name, part in splits.items()}
    assert sorted(unit for part in units.values() for unit in part) == sorted(d.unit for d in documents)
    held = [int(unit[1:]) for unit in units["heldout"]]
    assert len(held) >= 6
    assert any(b - a == 1 for a, b in itertools.pairwise(held))


def test_both_bibles_hold_out_the_same_chapters() -> None:
    chapters = [f"Book {n}" for n in range(60)]
    made = {
        name: [sources.Document(name, unit, f"{name} {unit} " * 600) for unit in chapters] for name in ("kjv", "web")
    }
    splits = data.split(made, seed=2)
    for part in splits.values():
        assert {d.unit for d in part if d.source == "kjv"} == {d.unit for d in part if d.source == "web"}


def test_a_paragraph_that_quotes_held_out_text_is_dropped() -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    splits: data.Splits = {
        "train": [sources.Document("a", "u", f"Kept here.\n\nHe said: {words.upper()}, and left.\n\nKept as well.")],
        "valid": [],
        "heldout": [sources.Document("b", "v", f"It begins. {words}. It ends.")],
    }
    assert data.drop_near_duplicates(splits)["a"] > 60
    assert splits["train"][0].text == "Kept here.\n\nKept as well."


def test_special_ids_and_config_files_agree() -> None:
    decoder = json.loads((BUILTIN / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {entry["content"]: int(token_id) for token_id, entry in decoder.items()} == tokenizer.SPECIAL_IDS
    stops = json.loads((BUILTIN / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.SPECIAL_IDS["[EOS]"], tokenizer.SPECIAL_IDS["<|im_end|>"]]
    assert (BUILTIN / "chat_template.jinja").read_text() == tokenizer.CHAT_TEMPLATE


def test_training_conversations_have_the_template_form() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    encoding = tokenizer.load_encoding(BUILTIN)
    talk = [
        chat.Message("system", "Be brief."),
        chat.Message("user", "What is a kluge?"),
        chat.Message("assistant", "A hack.\n\nTwo."),
    ]
    template = ImmutableSandboxedEnvironment().from_string((BUILTIN / "chat_template.jinja").read_text())
    as_parts = [{"role": m.role, "content": [{"type": "text", "text": m.content}]} for m in talk]
    for messages in ([{"role": m.role, "content": m.content} for m in talk], as_parts):
        rendered = template.render(messages=messages, add_generation_prompt=False)
        assert encoding.encode(rendered, allowed_special="all") == tokenizer.encode_conversation(encoding, talk)
    opened = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert opened == "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"


def test_vocabulary_restores_every_byte() -> None:
    encoding = tokenizer.load_encoding(BUILTIN)
    assert encoding.n_vocab == tokenizer.VOCAB_SIZE == 4096
    raw = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8).tobytes().decode("latin-1")
    for text in (raw, "caf\u00e9 \u4f60\u597dworld \U0001f600", "I'LL  go\r\n\n 12345"):
        assert encoding.decode(encoding.encode_ordinary(text)) == text
