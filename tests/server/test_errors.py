"""What the server refuses, by status, code and name, always in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.server.driving import CHAT, COMPLETIONS, Connection, events, post, request, until, user
from tests.server.fake_engine import FakeEngine, numerical_error

from deltafold import EngineClosedError
from deltafold.server.app import create_app
from deltafold.server.protocol import INERT_VALUES, ChatRequest, CompletionRequest, ErrorResponse

APP = create_app(FakeEngine())


def refused(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorResponse.model_validate(response.json(), strict=True).model_dump()["error"]


BAD_VALUES = [
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 65}, "logprobs"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"echo": True, "stream": True, "logprobs": 1}, "logprobs"),
]


@pytest.mark.parametrize(("change", "param"), BAD_VALUES)
def test_values_out_of_range_are_400_and_named(change, param):
    error = refused(post(APP, COMPLETIONS, **({"prompt": "hi"} | change)), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


BAD_TYPES = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [True]}, "prompt.0"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"stream_options": {"include_usage": True}}, None),
]


@pytest.mark.parametrize(("change", "param"), BAD_TYPES)
def test_wrong_types_are_422_and_named(change, param):
    error = refused(post(APP, COMPLETIONS, **({"prompt": "hi"} | change)), 422)
    assert error["param"] == param


BAD_MESSAGES = [
    ([], 422, "messages"),
    ([{"role": "bard", "content": "x"}], 422, "messages.0"),
    ([{"role": "user"}], 422, "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], 422, "messages.0.content.0.type"),
    ([{"role": "user", "content": "x", "mood": "y"}], 400, "messages.0.mood"),
    ([{"role": "system", "content": "x"}], 400, "messages"),
]


@pytest.mark.parametrize(("messages", "status", "param"), BAD_MESSAGES)
def test_bad_messages_are_named(messages, status, param):
    assert refused(post(APP, CHAT, messages=messages), status)["param"] == param


def test_the_offending_value_is_shown():
    part = {"type": "image_url", "image_url": "x"}
    error = refused(post(APP, CHAT, messages=[{"role": "user", "content": [part]}]), 422)
    assert "'image_url'" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields_are_refused_by_name(path):
    error = refused(post(APP, path, prompt="hi", messages=user("hi"), temprature=0), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] in ("temprature", "prompt", "messages")
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": user("hi")}
    error = refused(post(APP, path, **body, temprature=0), 400)
    assert error["message"] == "unknown field 'temprature'"


INERT = [
    (path, name)
    for path, model in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))
    for name in INERT_VALUES
    if name in model.model_fields
]


@pytest.mark.parametrize(("path", "name"), INERT)
def test_fields_without_support_pass_only_where_they_mean_nothing(path, name):
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": user("hi")}
    for value in INERT_VALUES[name]:
        assert post(APP, path, **body, **{name: value}).status_code == 200
    for value in ("something", 2, True, 0, {"type": "json_object"}, [{}]):
        error = refused(post(APP, path, **body, **{name: value}), 400)
        assert error["param"] == name
        assert name in error["message"]


def test_harmless_fields_pass():
    harmless = {"user": "u", "metadata": {"k": "v"}, "store": False, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert post(APP, COMPLETIONS, prompt="hi", **harmless).status_code == 200
    assert post(APP, CHAT, messages=user("hi"), parallel_tool_calls=True, **harmless).status_code == 200


def test_two_limits_that_differ_are_refused():
    error = refused(post(APP, CHAT, messages=user("hi"), max_tokens=3, max_completion_tokens=4), 400)
    assert error["param"] == "max_completion_tokens"
    assert post(APP, CHAT, messages=user("hi"), max_tokens=3, max_completion_tokens=3).status_code == 200


def test_top_logprobs_needs_logprobs():
    assert refused(post(APP, CHAT, messages=user("hi"), top_logprobs=1), 400)["param"] == "top_logprobs"


def test_context_overflow_has_both_numbers():
    error = refused(post(APP, COMPLETIONS, prompt="hi", max_tokens=1000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1002" in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_another_model_is_404(path):
    body = {CHAT: {"messages": user("x")}, COMPLETIONS: {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    error = refused(post(APP, path, model="gpt", **body.get(path, {"tokens": [1]})), 404)
    assert error["code"] == "model_not_found"
    assert "'gpt'" in error["message"]
    assert "'fake'" in error["message"]


BODIES = [
    (b"{", 400, "invalid_json"),
    (b"", 422, "invalid_type"),
    (b"[]", 422, "invalid_type"),
    (b'{"prompt": "\xff"}', 400, None),
    (b'{"prompt": "\\ud800"}', 400, "invalid_value"),
    (b'{"prompt": "x", "temperature": NaN}', 422, "invalid_type"),
    (b'{"prompt": "x", "temperature": 1e999}', 422, "invalid_type"),
    (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", 400, None),
    (b"[" * 100_000, 400, None),
]


@pytest.mark.parametrize(("body", "status", "code"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies(body, status, code):
    response = request(APP, "POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert refused(response, status)["code"] == code


def test_a_body_not_declared_as_json_is_415():
    response = request(APP, "POST", COMPLETIONS, content=b"prompt=x", headers={"Content-Type": "text/plain"})
    assert "'text/plain'" in refused(response, 415)["message"]


async def in_pieces(piece: bytes, num: int):
    for _ in range(num):
        yield piece


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_over_the_limit_is_413(is_declared):
    app = create_app(FakeEngine(max_model_len=100), max_body_bytes=40)
    fits = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert request(app, "POST", COMPLETIONS, content=fits, headers={"Content-Type": "application/json"}).is_success
    content = fits + b" " * 41 if is_declared else in_pieces(fits, 3)
    response = request(app, "POST", COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert "40" in refused(response, 413)["message"]


def test_unknown_paths_and_methods():
    refused(request(APP, "GET", "/v1/nothing"), 404)
    response = request(APP, "GET", COMPLETIONS)
    refused(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_full_queue_is_429_and_says_when_to_come_again(is_stream):
    engine = FakeEngine(max_waiting=3)
    app = create_app(engine)
    response = post(app, COMPLETIONS, prompt=["a", "b"], n=2, stream=is_stream)
    assert refused(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    assert engine.running == []  # the prompt that fitted does not stay behind
    assert post(app, COMPLETIONS, prompt="a").status_code == 200


def test_a_dead_engine_is_503_and_so_is_its_health():
    engine = FakeEngine()
    app = create_app(engine)
    assert request(app, "GET", "/health").json() == {"status": "ok"}
    engine.fail(EngineClosedError("the engine died: KeyError('x')"))
    for is_stream in (True, False):
        refused(post(app, COMPLETIONS, prompt="a", stream=is_stream), 503)
    refused(request(app, "GET", "/health"), 503)
    assert b"deltafold_engine_up 0.0" in request(app, "GET", "/metrics").content


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(numerical_error(), 500, "not_finite"), (EngineClosedError("the engine died"), 503, "engine_closed")],
)
def test_failures_while_running(error, status, code):
    async def run(is_stream: bool) -> Connection:
        engine = FakeEngine(is_stepping=False)
        connection = Connection(create_app(engine), COMPLETIONS, {"prompt": "hi", "stream": is_stream})
        await until(lambda: engine.running)
        engine.step()
        await until(lambda: not is_stream or b'"G"' in connection.body)
        engine.fail(error)
        await connection.finish()
        return connection

    whole = asyncio.run(run(is_stream=False))
    assert whole.sent[0]["status"] == status
    assert json.loads(whole.body)["error"]["code"] == code
    streamed = asyncio.run(run(is_stream=True))
    assert streamed.sent[0]["status"] == 200
    *_, last = events(streamed.body.decode())  # the error is the last event: no [DONE], which would say all is well
    assert last["error"]["code"] == code
    assert streamed.sent[-1] == {"type": "http.response.body", "body": b""}


def test_a_defect_is_a_500_that_shows_nothing_inside():
    class Defective(FakeEngine):
        def encode(self, text):
            raise KeyError("secret")

    error = refused(post(create_app(Defective()), COMPLETIONS, prompt="hi"), 500)
    assert error["type"] == "server_error"
    assert "secret" not in json.dumps(error)


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_aborted_request_says_so(is_stream):
    async def run() -> Connection:
        engine = FakeEngine(is_stepping=False)
        app = create_app(engine)
        connection = Connection(app, COMPLETIONS, {"prompt": "hi", "stream": is_stream})
        await until(lambda: engine.running)
        engine.step()
        assert app.state.server.abort_in_flight() == 1
        await connection.finish()
        return connection

    body = asyncio.run(run()).body.decode()
    choice = (events(body)[-2] if is_stream else json.loads(body))["choices"][0]
    assert choice["finish_reason"] == "abort"
