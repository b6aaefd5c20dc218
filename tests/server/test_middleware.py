"""Key, CORS, logs and the page's files: what wraps the routes."""

from __future__ import annotations

import json
import logging

import pytest
from tests.server.driving import CHAT, COMPLETIONS, post, request, user
from tests.server.fake_engine import FakeEngine

from deltafold import OptionError, RequestError
from deltafold.server import middleware
from deltafold.server.app import create_app

KEYED = create_app(FakeEngine(), api_key="s3cret-ü")
LOCKED = ["/v1/models", "/v1/models/fake", "/metrics", COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/nothing"]
OPEN = ["/", "/page.js", "/page.css", "/health", "/version", "/openapi.json"]


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"Authorization": f"{scheme} {key}".encode()}


@pytest.mark.parametrize("path", LOCKED)
def test_without_the_key_a_path_is_401(path):
    for headers in (
        {},
        bearer("wrong"),
        bearer("s3cret-ü", "Basic"),
        bearer(""),
        {"Authorization": b"s3cret-\xc3\xbc"},
    ):
        for method in ("GET", "POST"):
            response = request(KEYED, method, path, headers=headers, content=b"{" if method == "POST" else None)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", OPEN)
def test_open_paths_need_no_key(path):
    assert request(KEYED, "GET", path).status_code == 200


def test_the_key_opens():
    for scheme in ("Bearer", "bearer"):
        response = request(KEYED, "POST", COMPLETIONS, headers=bearer("s3cret-ü", scheme), json={"prompt": "hi"})
        assert response.status_code == 200


def test_the_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((len(given), len(expected)))
        return given == expected

    monkeypatch.setattr(middleware.hmac, "compare_digest", compare)
    for key in ("", "s", "s3cret-ü", "s3cret-ü and more"):
        request(KEYED, "GET", "/v1/models", headers=bearer(key))
    assert compared == [(32, 32)] * 4


@pytest.mark.parametrize("option", [{"api_key": ""}, {"served_model_name": ""}, {"max_body_bytes": 0}])
def test_options_that_make_no_sense_are_refused(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        create_app(FakeEngine(), **option)


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_cors_is_off_unless_asked_for():
    app = create_app(FakeEngine())
    assert "access-control-allow-origin" not in request(app, "OPTIONS", CHAT, headers=PREFLIGHT).headers
    assert "access-control-allow-origin" not in request(app, "GET", "/health", headers=PREFLIGHT).headers


def test_cors_lets_in_the_origins_named_and_needs_no_key_for_the_preflight():
    app = create_app(FakeEngine(), cors_origins=["https://a.example"], api_key="k")
    allowed = request(app, "OPTIONS", CHAT, headers={**PREFLIGHT, "Access-Control-Request-Headers": "authorization"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = request(app, "OPTIONS", CHAT, headers={**PREFLIGHT, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = request(app, "GET", "/v1/models", headers=PREFLIGHT)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"  # so that the page can read why


def logged(caplog, *calls) -> list[dict]:
    with caplog.at_level(logging.INFO, "deltafold.server"):
        for call in calls:
            call()
    return [json.loads(record.message) for record in caplog.records if record.name.startswith("deltafold.server.")]


def test_a_call_is_logged_with_its_figures(caplog):
    app = create_app(FakeEngine())
    ids = []
    request_line, access_line = logged(
        caplog,
        lambda: ids.append(post(app, COMPLETIONS, prompt=["hi", "you"], n=2, max_tokens=3).headers["x-request-id"]),
    )
    assert access_line | {"ms": 0} == {
        "event": "access", "id": ids[0], "client": "127.0.0.1", "method": "POST", "path": COMPLETIONS, "status": 200,
        "ms": 0,
    }  # fmt: skip
    assert request_line | {"ms": 0} == {
        "event": "request", "id": f"cmpl-{ids[0]}", "route": COMPLETIONS, "stream": False, "n": 2, "num_prompts": 2,
        "num_prompt_tokens": 5, "num_output_tokens": 12, "num_cached_tokens": 0, "finish_reasons": ["length"] * 4,
        "outcome": "ok", "error": None, "ttft_ms": None, "ms": 0,
    }  # fmt: skip


def test_a_stream_is_logged_with_its_time_to_the_first_token(caplog):
    app = create_app(FakeEngine())
    line, _ = logged(caplog, lambda: post(app, CHAT, messages=user("hi"), stream=True, max_tokens=3))
    assert line["stream"] is True
    assert line["num_output_tokens"] == 3
    assert line["finish_reasons"] == ["length"]
    assert 0 < line["ttft_ms"] <= line["ms"]


def test_no_log_has_text_of_prompts_or_answers(caplog):
    caplog.set_level(logging.DEBUG)
    app = create_app(FakeEngine(reply="a private answer"))
    long = "a private question " * 20
    logged(
        caplog,
        lambda: post(app, COMPLETIONS, prompt="a private question", echo=True),
        lambda: post(app, CHAT, messages=user("a private question"), stream=True),
        lambda: post(app, COMPLETIONS, prompt=long),  # too long for the context
        lambda: post(app, COMPLETIONS, prompt="x", stop=["a private stop", ""]),
        lambda: post(app, COMPLETIONS, prompt={"a private": "question"}),
    )
    assert len(caplog.records) >= 8
    assert "private" not in caplog.text


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_log_names_an_error_without_its_message(caplog, is_stream):
    class Quoting(FakeEngine):
        def _submit(self, prompts, params, request_id):
            raise RequestError(f"cannot take {self.decode(prompts[0])!r}")

    app = create_app(Quoting())
    line, _ = logged(caplog, lambda: post(app, COMPLETIONS, prompt="a private question", stream=is_stream))
    assert (line["outcome"], line["error"]) == ("error", "RequestError")
    assert "private" not in caplog.text


def test_a_path_cannot_forge_a_log_line(caplog):
    lines = logged(caplog, lambda: request(create_app(FakeEngine()), "GET", '/x%0a{"event":"access"}'))
    assert [record.message.count("\n") for record in caplog.records if "deltafold" in record.name] == [0]
    assert lines[0]["status"] == 404


def test_the_page_lets_no_other_host_in():
    response = request(KEYED, "GET", "/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "'unsafe" not in policy
    for path in ("/", "/page.js", "/page.css"):
        assert "http://" not in request(KEYED, "GET", path).text
        assert "https://" not in request(KEYED, "GET", path).text
