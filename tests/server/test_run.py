"""Starting and stopping: options, the drain at SIGTERM and its limit, what the process leaves in its log."""

from __future__ import annotations

import argparse
import json
import socket

import httpx
import pytest
from tests.server.driving import COMPLETIONS, events
from tests.server.fake_engine import FakeEngine
from tests.server.serving import FAKE, ServerProcess

from deltafold import OptionError
from deltafold.server.run import API_KEY_VARIABLE, add_arguments, serve

BODY = {"prompt": "hi", "max_tokens": 250, "stream": True}


def fake_server(*arguments: str) -> ServerProcess:
    return ServerProcess(*arguments, command=FAKE)


def test_a_drain_lets_streams_end_and_takes_nothing_new():
    with (
        fake_server("--served-model-name", "m") as server,
        httpx.Client(base_url=server.url) as client,
        httpx.Client() as idle,
    ):
        assert idle.get(server.url + "/health").json() == {"status": "ok"}
        with client.stream("POST", COMPLETIONS, json=BODY) as response:
            chunks = response.iter_text()
            received = next(chunks)
            server.process.terminate()
            while not any("draining" in line for line in server.log):
                received += next(chunks)
            with pytest.raises(httpx.ConnectError):
                httpx.get(server.url + "/health")
            received += "".join(chunks)
        assert server.wait() == 0
    *_, last, done = events(received)
    assert last["model"] == "m"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert [line["event"] for line in lines] == ["access", "request", "access"]


def test_a_drain_has_a_limit():
    with fake_server("--drain-seconds", "0.2", "--reply", "x" * 240) as server:
        with httpx.stream("POST", server.url + COMPLETIONS, json=BODY, timeout=60) as streamed:
            received = streamed.iter_text()
            text = next(received)
            server.process.terminate()
            text += "".join(received)
        assert server.wait() == 0
        assert any("drain limit of 0.2 s" in line for line in server.log)
    *_, last, done = events(text)
    assert last["choices"][0]["finish_reason"] == "abort"
    assert done == "[DONE]"


def test_the_key_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "from-env")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).api_key == "from-env"
    assert parser.parse_args(["--api-key", "given"]).api_key == "given"


OPTIONS = [("drain_seconds", -1.0), ("drain_seconds", float("nan")), ("port", 65536), ("host", "no such host")]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_options_that_make_no_sense_are_refused(name, value):
    with pytest.raises(OptionError, match=str(value)):
        serve(FakeEngine(), **{name: value})


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=str(port)):
            serve(FakeEngine(), port=port)
