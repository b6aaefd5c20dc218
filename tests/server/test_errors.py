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


MALFORMED = [
    ({"prompt": ...}, "prompt", "prompt is missing"),
    ({"prompt": 5}, "prompt", "prompt must be a string or an array, got 5"),
    ({"prompt": None}, "prompt", "prompt must be a string or an array, got null"),
    ({"prompt": []}, "prompt", "prompt must have at least 1 element, got 0"),
    ({"prompt": [[]]}, "prompt.0", "prompt.0 must have at least 1 element, got 0"),
    ({"prompt": ["x"] * 2049}, "prompt", "prompt must have at most 2048 elements, got 2049"),
    ({"prompt": [1, "a"]}, "prompt.1", "prompt.1 must be an integer, got 'a'"),
    ({"prompt": ["a", 1]}, "prompt.1", "prompt.1 must be a string, got 1"),
    ({"prompt": [[1, "a"]]}, "prompt.0.1", "prompt.0.1 must be an integer, got 'a'"),
    ({"prompt": [True]}, "prompt.0", "prompt.0 must be an integer or an array or a string, got true"),
    ({"prompt": {"x": 1}}, "prompt", "prompt must be a string or an array"),
    ({"n": "2"}, "n", "n must be an integer, got '2'"),
    ({"n": True}, "n", "n must be an integer, got true"),
    ({"n": 1.5}, "n", "n must be an integer, got 1.5"),
    ({"temperature": "hot"}, "temperature", "temperature must be a number, got 'hot'"),
    ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
    ({"stop": 5}, "stop", "stop must be a string or an array, got 5"),
    ({"stop": ["x", 5]}, "stop.1", "stop.1 must be a string, got 5"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "logit_bias.1 must be a number, got 'x'"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias must be an object"),
    ({"stream_options": 3, "stream": True}, "stream_options", "stream_options must be an object, got 3"),
    ({"stream_options": {}}, "stream_options", "stream_options is only allowed when stream is true"),
    (
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        "stream_options.include_obfuscation", "stream_options.include_obfuscation must be false, got true",
    ),
    ({"user": "x" * 100, "n": "y" * 100}, "n", "n must be an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "message"), MALFORMED)
def test_malformed_fields_are_400_and_named_with_their_value(change, param, message):
    body = {name: value for name, value in ({"prompt": "hi"} | change).items() if value is not ...}
    error = refused(post(APP, COMPLETIONS, **body), 400)
    assert error["message"] == message
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    is_value = any(word in message for word in ("must have", "only allowed", "must be false"))
    is_missing = "missing" in message
    expected = "missing_required_parameter" if is_missing else "invalid_value" if is_value else "invalid_type"
    assert error["code"] == expected


IMAGE = {"type": "image_url", "image_url": "x"}
BAD_MESSAGES = [
    ([], "messages", "messages must have at least 1 element, got 0"),
    (5, "messages", "messages must be an array, got 5"),
    ([5], "messages.0", "messages.0 must be an object, got 5"),
    ([{"content": "x"}], "messages.0.role", "messages.0.role is missing"),
    (
        [{"role": "bard", "content": "x"}], "messages.0.role",
        "messages.0.role must be one of 'system', 'developer', 'user', 'assistant', 'tool', got 'bard'",
    ),
    ([{"role": "user"}], "messages.0.content", "messages.0.content is missing"),
    (
        [{"role": "user", "content": None}], "messages.0.content",
        "messages.0.content must be a string or an array, got null",
    ),
    (
        [{"role": "user", "content": [IMAGE]}], "messages.0.content.0.type",
        "messages.0.content.0.type must be 'text', got 'image_url'",
    ),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "messages.0.content.0 must be an object, got 'x'"),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "audio": {}}], "messages.1.audio",
        "messages.1.audio must be null",
    ),
    ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id", "messages.0.tool_call_id is missing"),
    ([{"role": "user", "content": "x", "mood": "y"}], "messages.0.mood", "unknown field 'messages.0.mood'"),
    ([{"role": "system", "content": "x"}], "messages", "the last message must not be the system's"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param", "message"), BAD_MESSAGES)
def test_bad_messages_are_400_and_named(messages, param, message):
    error = refused(post(APP, CHAT, messages=messages), 400)
    assert (error["param"], error["message"]) == (param, message)


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
    (b"{", "invalid_json", "the body is not valid JSON: Expecting property name enclosed in double quotes"),
    (b"", "invalid_json", "the body is empty, it must be a JSON object"),
    (b"[]", "invalid_type", "the body must be a JSON object"),
    (b'"x"', "invalid_type", "the body must be a JSON object"),
    (b'{"prompt": "\xff"}', "invalid_json", "the body is not valid JSON: byte 12 is not UTF-8"),
    (b'{"prompt": "\\ud800"}', "invalid_value", "text has a lone surrogate at 0"),
    (b'{"prompt": "x", "temperature": NaN}', "invalid_value", "temperature must be a finite number, got nan"),
    (b'{"prompt": "x", "temperature": 1e999}', "invalid_value", "temperature must be a finite number, got inf"),
    (
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "invalid_json",
        "the body is not valid JSON: a number has too many digits",
    ),
    (b"[" * 100_000, "invalid_json", "the body is not valid JSON: it is nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code", "message"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies(body, code, message):
    response = request(APP, "POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    error = refused(response, 400)
    assert (error["code"], error["message"]) == (code, message)


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
    error = refused(response, 413)
    assert error["code"] == "body_too_large"
    assert error["message"].endswith(" bytes, at most 40 are allowed")


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize(("num_bytes", "status"), [(64, 200), (65, 413)])
def test_the_body_limit_is_the_largest_body_taken(is_declared, num_bytes, status):
    app = create_app(FakeEngine(max_model_len=100), max_body_bytes=64)
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(num_bytes)
    content = body if is_declared else in_pieces(body, 1)
    response = request(app, "POST", COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status


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
    assert refused(request(app, "GET", "/health"), 503)["code"] == "engine_closed"
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
