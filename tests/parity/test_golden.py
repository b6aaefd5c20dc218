"""The golden run's file: what is written is read back, and every field that is wrong is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.parity.goldens_of import tiny_golden

from deltafold import Engine, GoldenError
from deltafold.parity.golden import NUM_TOP, from_json, load, save, to_json

Document = dict[str, Any]


@pytest.fixture(scope="module")
def document(engine: Engine) -> Document:
    return to_json(tiny_golden(engine, num_steps=3))


def test_file_is_read_back_whole(engine: Engine, tmp_path: Path) -> None:
    golden = tiny_golden(engine, num_steps=3)
    path = tmp_path / "golden.json"
    save(golden, path)
    loaded = load(path)
    assert loaded.origin == golden.origin
    assert loaded.model == golden.model
    assert [prompt.token_ids for prompt in loaded.prompts] == [prompt.token_ids for prompt in golden.prompts]
    for ours, theirs in zip(loaded.prompts, golden.prompts, strict=True):
        assert ours.output_token_ids == theirs.output_token_ids
        for step, original in zip(ours.steps, theirs.steps, strict=True):
            assert len(step.top) == NUM_TOP
            assert step.logprob == pytest.approx(original.logprob, abs=1e-6)
    save(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def step(document: Document, index: int = 1) -> Document:
    found: Document = document["prompts"][1]["steps"][index]
    return found


def set_in(where: Callable[[Document], Document], name: str, value: object) -> Callable[[Document], None]:
    return lambda document: where(document).__setitem__(name, value)


def top(document: Document) -> Document:
    return document["prompts"][0]["steps"][0]["top"]  # type: ignore[no-any-return]


EDITS: dict[str, tuple[Callable[[Document], object], str]] = {
    "format": (lambda d: d.update(format="other"), "format must be"),
    "version": (lambda d: d.update(version=2), "version must be 1, got 2"),
    "missing field": (lambda d: d.pop("model"), "missing model"),
    "unknown field": (lambda d: d.update(note=""), "unknown note"),
    "engine": (set_in(lambda d: d["origin"], "engine", "vllm"), "origin.engine"),
    "dtype": (set_in(lambda d: d["origin"], "dtype", "float16"), "origin.dtype"),
    "residual dtype": (set_in(lambda d: d["origin"], "residual_dtype", None), "origin.residual_dtype"),
    "version of the engine": (set_in(lambda d: d["origin"], "engine_version", ""), "origin.engine_version is empty"),
    "dtype edited to a valid one": (set_in(lambda d: d["origin"], "dtype", "bfloat16"), "outside the prompts"),
    "fingerprint": (set_in(lambda d: d["model"], "fingerprint", "abc"), "model.fingerprint"),
    "tokenizer": (set_in(lambda d: d["model"], "tokenizer", "g" * 32), "model.tokenizer"),
    "vocabulary": (set_in(lambda d: d["model"], "vocab_size", True), "model.vocab_size"),
    "max_tokens": (lambda d: d.update(max_tokens=4), "steps must be exactly 4"),
    "ignore_eos": (lambda d: d.update(ignore_eos=1), "ignore_eos must be of type bool"),
    "no prompts": (lambda d: d.update(prompts=[]), "prompts is empty"),
    "a prompt dropped": (lambda d: d["prompts"].pop(), "their number"),
    "prompt ids edited": (lambda d: d["prompts"][1]["token_ids"].reverse(), r"prompts\[1\]: digest"),
    "prompt id outside": (lambda d: d["prompts"][0]["token_ids"].append(4096), r"prompts\[0\].token_ids\[5\]"),
    "prompt id no integer": (lambda d: d["prompts"][0]["token_ids"].append(1.0), r"prompts\[0\].token_ids\[5\]"),
    "prompt text edited": (set_in(lambda d: d["prompts"][0], "text", "x"), r"prompts\[0\]: digest"),
    "no ids": (set_in(lambda d: d["prompts"][0], "token_ids", []), r"prompts\[0\].token_ids is empty"),
    "step dropped": (lambda d: d["prompts"][0]["steps"].pop(), r"prompts\[0\].steps must be exactly 3"),
    "chosen id edited": (set_in(step, "token_id", 7), r"prompts\[1\].steps\[1\].token_id: 7"),
    "second best chosen": (
        lambda d: step(d).update(token_id=step(d)["top"][1][0], logprob=step(d)["top"][1][1]),
        "a golden run is greedy",
    ),
    "logprobs missing": (lambda d: step(d).pop("top"), r"prompts\[1\].steps\[1\]: missing top"),
    "logprob null": (set_in(step, "logprob", None), r"prompts\[1\].steps\[1\].logprob"),
    "logprob positive": (set_in(step, "logprob", 0.5), r"prompts\[1\].steps\[1\].logprob"),
    "fewer logprobs": (lambda d: top(d).pop(), r"steps\[0\].top must have 20 entries, got 19"),
    "logprobs out of order": (lambda d: top(d).reverse(), r"top\[1\]: logprob"),
    "token twice": (lambda d: top(d)[5].__setitem__(0, top(d)[4][0]), "names a token twice"),
    "not a pair": (lambda d: top(d)[5].append(1), r"top\[5\] must be \[token id, logprob\]"),
    "more than all": (
        lambda d: [pair.__setitem__(1, -0.1) for pair in top(d)],
        "the probabilities add up to 18.0967",
    ),
    "a low logprob edited": (lambda d: top(d)[19].__setitem__(1, top(d)[19][1] - 0.01), r"prompts\[0\]: digest"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_file_is_refused_by_name(name: str, document: Document) -> None:
    edit, message = EDITS[name]
    copy = json.loads(json.dumps(document))
    edit(copy)
    with pytest.raises(GoldenError, match=message):
        from_json(copy, "golden.json")


def test_unedited_document_is_taken(document: Document) -> None:
    assert to_json(from_json(document, "golden.json")) == document


@pytest.mark.parametrize(
    ("content", "message"), [("[", "not JSON"), ("NaN", "not JSON"), ("[]", "must be an object"), ("\x80", "not JSON")]
)
def test_other_content_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(GoldenError, match=message):
        load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match=r"none.json: cannot be read"):
        load(tmp_path / "none.json")
