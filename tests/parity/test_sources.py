"""The three sources of golden runs: ours, transformers and a server say the same; wrong answers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.checkpoints import base_config, random_prompt, write_checkpoint

from deltafold import Engine, GoldenError, LoadError, OptionError
from deltafold.parity.compare import compare
from deltafold.parity.from_server import ServerSource
from deltafold.parity.from_transformers import TransformersSource
from deltafold.parity.golden import NUM_TOP
from deltafold.parity.prompts import Prompt, read_prompts
from deltafold.parity.record import EngineSource, record, tokenizer_fingerprint
from deltafold.parity.verdict import Verdict
from deltafold.server.app import create_app

PROMPTS = [Prompt(None, tuple(random_prompt(i, length))) for i, length in enumerate((9, 4, 9))]
BASE_URL = "http://testserver/v1"


def test_transformers_and_ours_are_identical(tmp_path: Path) -> None:
    """Sizes are such that transformers' default way to compute experts takes them."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 8}
    write_checkpoint(tmp_path, base_config(**sizes))
    source = TransformersSource(str(tmp_path))
    with Engine.load(str(tmp_path), device="cpu", max_num_seqs=4) as loaded:
        golden = record(PROMPTS, source, loaded, max_tokens=6, ignore_eos=True)
        assert golden.origin.engine == "transformers"
        assert [len(prompt.steps) for prompt in golden.prompts] == [6, 6, 6]
        assert compare(golden, loaded).verdict is Verdict.IDENTICAL


def test_transformers_stops_at_an_end_token(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TransformersSource(str(tiny_folder))
    source._model.set_experts_implementation("eager")
    prompts = [prompt.token_ids for prompt in PROMPTS[:1]]
    whole = source.complete(prompts, max_tokens=4, ignore_eos=True)[0]
    monkeypatch.setattr(source._model.generation_config, "eos_token_id", [whole[1].token_id])
    stopped = source.complete(prompts, max_tokens=4, ignore_eos=False)[0]
    first = next(i for i, step in enumerate(whole) if step.token_id == whole[1].token_id)
    assert stopped == whole[: first + 1]


def test_transformers_refuses_what_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="transformers cannot load"):
        TransformersSource(str(tmp_path))
    with pytest.raises(OptionError, match="dtype must be one of"):
        TransformersSource("builtin", dtype="float16")


def test_server_and_ours_say_the_same(engine: Engine) -> None:
    with TestClient(create_app(engine)) as client:
        source = ServerSource(BASE_URL, engine, client=client)
        golden = record(PROMPTS, source, engine, max_tokens=5, ignore_eos=True)
    own = record(PROMPTS, EngineSource(engine), engine, max_tokens=5, ignore_eos=True)
    assert golden.origin.dtype == "unknown"
    for theirs, ours in zip(golden.prompts, own.prompts, strict=True):
        assert theirs.output_token_ids == ours.output_token_ids
        for a, b in zip(theirs.steps, ours.steps, strict=True):
            assert len(a.top) == NUM_TOP
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert dict(a.top).keys() == dict(b.top).keys()
    assert compare(golden, engine).verdict is Verdict.IDENTICAL


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def completion(tokens: list[str], top: list[dict[str, float]]) -> dict[str, Any]:
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": top}
    return {"choices": [{"logprobs": logprobs}]}


def test_tokens_named_by_id_are_understood(engine: Engine) -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers.get("authorization"), json.loads(request.content)))
        top = {f"token_id:{i}": -0.5 - i for i in range(25)}
        return httpx.Response(200, json=completion(["token_id:0"], [top]))

    source = ServerSource(BASE_URL, engine, served_model="m", api_key="k", client=answering(answer))
    steps = source.complete([[1, 2]], max_tokens=1, ignore_eos=False)[0]
    assert [token_id for token_id, _ in steps[0].top] == list(range(NUM_TOP))
    authorization, body = seen[0]
    assert authorization == "Bearer k"
    assert body == {"model": "m", "prompt": [1, 2], "max_tokens": 1, "temperature": 0, "logprobs": NUM_TOP}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(500, text="down"), "status 500: down"),
        (httpx.Response(200, text="<html>"), "v1/completions"),
        (httpx.Response(200, json={"choices": [{"logprobs": None}]}), "no usable logprobs"),
        (httpx.Response(200, json=completion(["no such token"], [{}])), "prompt 0, token 0: no token of"),
    ],
)
def test_unusable_answers_are_refused(engine: Engine, response: httpx.Response, message: str) -> None:
    source = ServerSource(BASE_URL, engine, served_model="m", client=answering(lambda _: response))
    with pytest.raises(GoldenError, match=message):
        source.complete([[1]], max_tokens=1, ignore_eos=False)


def test_text_that_two_tokens_share_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = engine.token_bytes
    monkeypatch.setattr(engine, "token_bytes", lambda i: b"shared" if i in (7, 8) else token_bytes(i), raising=False)
    response = httpx.Response(200, json=completion(["shared"], [{"shared": -0.5}]))
    source = ServerSource(BASE_URL, engine, served_model="m", client=answering(lambda _: response))
    with pytest.raises(GoldenError, match="more than one token of the model's tokenizer has the text 'shared'"):
        source.complete([[1]], max_tokens=1, ignore_eos=False)


def test_unreachable_server_is_refused(engine: Engine) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(GoldenError, match="models: refused"):
        ServerSource(BASE_URL, engine, client=answering(refuse))


def test_prompts_are_lines_or_json(engine: Engine, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("In the beginning\n\nIt is a truth\n")
    assert [prompt.text for prompt in read_prompts(lines, engine)] == ["In the beginning", "It is a truth"]
    assert read_prompts(lines, engine)[0].token_ids == tuple(engine.encode("In the beginning"))
    mixed = tmp_path / "prompts.json"
    mixed.write_text(json.dumps([[1, 2], "In the"]))
    assert read_prompts(mixed, engine) == [Prompt(None, (1, 2)), Prompt("In the", tuple(engine.encode("In the")))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "at least one prompt"),
        ("{}", "at least one prompt"),
        ("[1]", "prompt 0 must be a text or a list"),
        ("[[]]", "prompt 0 must be a text or a list"),
        ('["a", [4096]]', "prompt 1: 4096 is not a token id below 4096"),
        ("[[true]]", "prompt 0: True is not a token id"),
        ('[""]', "prompt 0 is empty"),
        ("[", "prompts.json: "),
    ],
)
def test_unusable_prompts_are_refused(engine: Engine, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(GoldenError, match=message):
        read_prompts(path, engine)


def test_tokenizer_fingerprint_sees_a_changed_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tokenizer_fingerprint(engine)
    assert before == tokenizer_fingerprint(engine)
    token_bytes = engine.token_bytes
    monkeypatch.setattr(engine, "token_bytes", lambda i: b"changed" if i == 4000 else token_bytes(i), raising=False)
    assert tokenizer_fingerprint(engine) != before
