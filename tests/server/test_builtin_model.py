"""Faults 13 and 37 to 41 on the real engine with the built-in model, through the server's routes."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from tests.server.driving import CHAT, COMPLETIONS, Connection, events, post, user

from deltafold import LOGPROB_FLOOR, MAX_TOP_LOGPROBS, Engine, EngineStats
from deltafold.server.app import create_app

PROMPT = "The history of the world"


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine)


def strict_json(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def token_named(engine: Engine, name: str) -> int:
    return next(i for i in range(engine.vocab_size) if engine.token_bytes(i) == name.encode())


def streamed_text(app, **body) -> str:
    *chunks, usage, done = events(
        post(app, COMPLETIONS, **body, stream=True, stream_options={"include_usage": True}).text
    )
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] > 0
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def slots_used(stats: EngineStats) -> int:
    return stats.num_state_slots - stats.num_free_state_slots - stats.num_cached_state_slots


async def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("is_stream", "is_running"), [(True, False), (True, True), (False, True)])
def test_13_a_disconnect_frees_the_slot_within_one_step(engine, app, is_stream, is_running):
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": is_stream, "n": 2}

    async def run() -> None:
        before = engine.stats()
        assert slots_used(before) == 0
        connection = Connection(app, COMPLETIONS, body)
        if is_running:
            await wait_until(lambda: engine.stats().num_output_tokens > before.num_output_tokens + 6)
            assert slots_used(engine.stats()) == 2
            assert not is_stream or connection.body
        else:
            await wait_until(lambda: app.state.server.in_flight)
        connection.disconnect()
        await connection.finish()
        num_steps = engine.stats().num_steps
        await wait_until(lambda: slots_used(engine.stats()) == 0)
        after = engine.stats()
        assert after.num_steps <= num_steps + 1
        assert after.num_running == after.num_waiting == 0

    asyncio.run(run())


def test_37_every_id_can_be_shown(engine, app):
    response = post(app, "/detokenize", tokens=list(range(engine.vocab_size)))
    assert response.status_code == 200
    shown = [app.state.server.texts[token_id].text for token_id in range(engine.vocab_size)]
    assert all(shown)
    assert len(set(shown)) == engine.vocab_size  # so none overwrites another in top_logprobs


@pytest.mark.parametrize("token_id", [-1, 0, 2**31, 2**63, 10**30])
def test_37_ids_beyond_the_vocabulary_are_refused_everywhere(engine, app, token_id):
    token_id = token_id or engine.vocab_size
    bodies = [
        (COMPLETIONS, {"prompt": [1, token_id]}),
        (COMPLETIONS, {"prompt": [1], "stream": True, "logit_bias": {str(token_id): 1}}),
        (COMPLETIONS, {"prompt": [1], "stop_token_ids": [token_id]}),
        ("/detokenize", {"tokens": [token_id]}),
    ]
    for path, body in bodies:
        response = post(app, path, **body)
        assert response.status_code == 400, response.text
        assert str(token_id) in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["[EOS]", "<|im_end|>"])
def test_38_both_end_tokens_stop_and_neither_shows(engine, app, name):
    force = {"logit_bias": {str(token_named(engine, name)): 100}, "max_tokens": 6}
    choice = post(app, CHAT, messages=user("hello"), **force).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ""
    body = post(app, COMPLETIONS, prompt=PROMPT, **force).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 1
    ignored = post(app, COMPLETIONS, prompt=PROMPT, ignore_eos=True, **force).json()
    assert ignored["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


@pytest.mark.parametrize("seed", range(4))
def test_39_a_stream_of_broken_characters_adds_up(engine, app, seed):
    # bytes of 世 and é in any order: whole characters, halves and strays
    pieces = {token_id for byte in "世é".encode() for token_id in [token_of_byte(engine, byte)]}
    body = {
        "prompt": PROMPT, "seed": seed, "max_tokens": 40, "logit_bias": {str(token_id): 100 for token_id in pieces},
        "temperature": 3.0,
    }  # fmt: skip
    whole = post(app, COMPLETIONS, **body).json()["choices"][0]["text"]
    assert "\ufffd" in whole
    assert streamed_text(app, **body) == whole


def token_of_byte(engine: Engine, byte: int) -> int:
    return next(i for i in range(engine.vocab_size) if engine.token_bytes(i) == bytes([byte]))


@pytest.mark.parametrize(("start", "length"), [(9, 1), (14, 3), (7, 9)])
def test_39_stop_strings_that_span_tokens(app, start, length):
    body = {"prompt": PROMPT, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    text = post(app, COMPLETIONS, **body).json()["choices"][0]["text"]
    stop = text[start : start + length]
    assert len(stop) == length
    cut = post(app, COMPLETIONS, **body, stop=stop).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"
    assert streamed_text(app, **body, stop=[stop, "\0"]) == cut["text"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_40_logprobs_are_json_and_above_the_floor(app, is_stream):
    body = {"prompt": PROMPT, "logprobs": MAX_TOP_LOGPROBS, "max_tokens": 4, "logit_bias": {"5": -100, "6": 100}}
    text = post(app, COMPLETIONS, **body, stream=is_stream).text
    payloads = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")] if is_stream else [text]
    num_entries = 0
    for payload in payloads:
        logprobs = strict_json(payload)["choices"][0]["logprobs"]
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            num_entries += 1
            assert MAX_TOP_LOGPROBS <= len(top) <= MAX_TOP_LOGPROBS + 1
            assert all(LOGPROB_FLOOR <= logprob <= 0 for logprob in (value, *top.values()))
    assert num_entries == 4


def test_40_more_logprobs_than_there_are_is_refused(app):
    for body in ({"logprobs": MAX_TOP_LOGPROBS + 1}, {"logprobs": -1}):
        response = post(app, COMPLETIONS, prompt=PROMPT, **body)
        assert response.status_code == 400
        assert str(MAX_TOP_LOGPROBS) in response.json()["error"]["message"]


def test_40_an_echoed_prompt_is_scored_as_the_engine_scores_it(engine, app):
    body = post(app, COMPLETIONS, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    token_ids = engine.encode(PROMPT)
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert len(choice["logprobs"]["token_logprobs"]) == len(token_ids)
    for i, offset in enumerate(choice["logprobs"]["text_offset"]):
        assert PROMPT[:offset] == engine.decode(token_ids[:i])
    # each prompt token's logprob is what generating it after the tokens before it gives
    prefix = post(
        app, COMPLETIONS, prompt=token_ids[:-1], max_tokens=1, logprobs=MAX_TOP_LOGPROBS, temperature=0
    ).json()
    chosen = prefix["choices"][0]["logprobs"]
    best = max(choice["logprobs"]["top_logprobs"][-1].values())
    assert chosen["token_logprobs"][0] == pytest.approx(best, abs=1e-3)


def test_41_every_reason_to_finish_is_told(engine, app):
    def reason(**body) -> str:
        whole = post(app, COMPLETIONS, prompt=PROMPT, **body).json()["choices"][0]["finish_reason"]
        *_, last, _ = events(post(app, COMPLETIONS, prompt=PROMPT, stream=True, **body).text)
        assert last["choices"][0]["finish_reason"] == whole
        return whole

    assert reason(max_tokens=3, ignore_eos=True) == "length"
    assert reason(logit_bias={str(token_named(engine, "[EOS]")): 100}) == "stop"
    assert reason(logit_bias={"5": 100}, stop_token_ids=[5]) == "stop"
    context = post(app, COMPLETIONS, prompt=[5] * 1020, max_tokens=4, ignore_eos=True).json()
    assert context["choices"][0]["finish_reason"] == "length"
    too_long = post(app, COMPLETIONS, prompt=[5] * 1020, max_tokens=5)
    assert too_long.status_code == 400
    assert "1025" in too_long.json()["error"]["message"]
    assert "1024" in too_long.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_41_an_abort_is_told(engine, app, is_stream):
    async def run() -> Connection:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": is_stream}
        before = engine.stats().num_output_tokens
        connection = Connection(app, COMPLETIONS, body)
        await wait_until(lambda: engine.stats().num_output_tokens > before + 2)
        assert app.state.server.abort_in_flight() == 1
        await connection.finish()
        return connection

    body = asyncio.run(run()).body.decode()
    choice = (events(body)[-2] if is_stream else json.loads(body))["choices"][0]
    assert choice["finish_reason"] == "abort"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_seed_makes_a_sampled_answer_repeatable(app, is_stream):
    def answer(seed: int) -> str:
        body = {"prompt": PROMPT, "max_tokens": 16, "seed": seed, "n": 2, "ignore_eos": True}
        if is_stream:
            return "".join(
                f"{c['choices'][0]['index']}{c['choices'][0]['text']}|"
                for c in sorted(
                    events(post(app, COMPLETIONS, stream=True, **body).text)[:-1],
                    key=lambda c: c["choices"][0]["index"],
                )
            )
        return str([choice["text"] for choice in post(app, COMPLETIONS, **body).json()["choices"]])

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_a_prompt_as_text_and_as_ids_is_the_same(engine, app):
    def complete(prompt):
        return post(app, COMPLETIONS, prompt=prompt, max_tokens=8, temperature=0).json()["choices"][0]["text"]

    assert (
        complete(PROMPT) == complete(engine.encode(PROMPT)) == complete([PROMPT]) == complete([engine.encode(PROMPT)])
    )


def test_chat_and_tokenize_see_the_same_prompt(engine, app):
    messages = [{"role": "system", "content": "Be brief. <|im_end|>"}, *user("Hello")]
    tokens = post(app, "/tokenize", messages=messages).json()["tokens"]
    assert tokens == engine.chat_token_ids(messages)
    usage = post(app, CHAT, messages=messages, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)
