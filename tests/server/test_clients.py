"""Real clients against `deltafold serve` with the built-in model: openai for Python and Node, litellm, curl."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest
from tests.server.conftest import API_KEY
from tests.server.driving import CHAT, COMPLETIONS, events
from tests.server.serving import PATIENCE_SECONDS, ServerProcess

NODE = Path(__file__).parent / "node"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
GREEDY = {"model": "builtin", "temperature": 0, "max_tokens": 12}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def slots_used(server: ServerProcess) -> float:
    text = httpx.get(server.url + "/metrics", headers={"Authorization": f"Bearer {API_KEY}"}).text
    return float(text.split("\ndeltafold_state_slots_used ")[1].split()[0])


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while slots_used(server):
        assert time.monotonic() < deadline


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answers(client) -> dict[str, str]:
    """What every client must get, as the openai client for Python got it whole."""
    completion = client.completions.create(prompt="The sea", **GREEDY)
    chat = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert completion.usage.completion_tokens <= 12
    return {"completion": completion.choices[0].text, "chat": chat.choices[0].message.content}


def test_openai_python_completes_and_streams(client, answers):
    assert answers["completion"]
    stream = client.completions.create(prompt="The sea", stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == answers["completion"]
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert last.choices == []
    assert last.usage.total_tokens > last.usage.prompt_tokens


def test_openai_python_chats_and_streams(client, answers):
    stop = answers["chat"][-4:]  # the assembler takes an answer cut at the limit for a failure
    with client.chat.completions.stream(messages=MESSAGES, stop=stop, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].message.content == answers["chat"][: answers["chat"].index(stop)]
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.role == "assistant"


def test_openai_python_gets_logprobs_of_both_kinds(client):
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    data = bytes(byte for entry in chat.logprobs.content for byte in entry.bytes or ())
    assert data.decode(errors="replace") == chat.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in chat.logprobs.content)
    legacy = client.completions.create(prompt="The sea", echo=True, logprobs=1, **GREEDY).choices[0].logprobs
    assert legacy.token_logprobs[0] is None
    assert len(legacy.tokens) == len(legacy.text_offset) == len(legacy.top_logprobs)


def test_openai_python_gets_its_own_exceptions(client, server):
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(messages=MESSAGES, model="gpt-5")
    with pytest.raises(openai.BadRequestError, match="max_model_len is 2048") as overflow:
        client.completions.create(model="builtin", prompt="x", max_tokens=4000)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="messages must have at least 1 element"):
        client.chat.completions.create(model="builtin", messages=[])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="no").models.list()


def test_openai_python_lists_and_retrieves_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_closes_a_stream_frees_its_slot(client, server, path):
    wait_until_idle(server)
    endless = {"model": "builtin", "max_tokens": 1900, "extra_body": {"ignore_eos": True}, "stream": True}
    if path == COMPLETIONS:
        stream = client.completions.create(prompt="The sea", **endless)
    else:
        stream = client.chat.completions.create(messages=MESSAGES, **endless)
    next(iter(stream))
    assert slots_used(server) == 1
    stream.close()
    wait_until_idle(server)
    records = [json.loads(line) for line in server.log if line.startswith('{"event": "request"')]
    assert records[-1]["outcome"] == "disconnected"
    assert records[-1]["num_output_tokens"] < 1900


def test_openai_node(server, answers):
    found = json.loads(run("node", str(NODE / "client.mjs"), server.url + "/v1", API_KEY))
    assert found["models"] == ["builtin"]
    assert found["completion"]["choices"][0]["text"] == answers["completion"]
    assert found["chat"]["choices"][0]["message"]["content"] == answers["chat"]
    assert len(found["chat"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert "".join(chunk["choices"][0]["text"] for chunk in found["completionStream"]) == answers["completion"]
    *chunks, usage = found["chatStream"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answers["chat"]
    assert usage["usage"]["completion_tokens"] == found["chat"]["usage"]["completion_tokens"]
    assert found["assembled"]["message"]["content"] == answers["chat"]
    assert found["refusal"]["kind"] == "BadRequestError"
    assert found["refusal"]["param"] == "tools"
    wait_until_idle(server)


def test_litellm(server, answers, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a price list
    import litellm

    common = {"api_base": server.url + "/v1", "api_key": API_KEY, "temperature": 0, "max_tokens": 12}
    chat = litellm.completion(model="openai/builtin", messages=MESSAGES, **common)
    assert chat.choices[0].message.content == answers["chat"]
    stream = litellm.completion(model="openai/builtin", messages=MESSAGES, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answers["chat"]
    text = litellm.text_completion(model="text-completion-openai/builtin", prompt="The sea", **common)
    assert text.choices[0].text == answers["completion"]


def test_curl(server, answers):
    def curl(path: str, body: dict) -> str:
        headers = ("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {API_KEY}")
        return run(
            "curl", "--silent", "--show-error", "--no-buffer", *headers, "-d", json.dumps(body), server.url + path
        )

    whole = json.loads(curl(COMPLETIONS, GREEDY | {"prompt": "The sea"}))
    assert whole["choices"][0]["text"] == answers["completion"]
    chat = json.loads(curl(CHAT, GREEDY | {"messages": MESSAGES}))
    assert chat["choices"][0]["message"]["content"] == answers["chat"]
    *chunks, done = events(curl(CHAT, GREEDY | {"messages": MESSAGES, "stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answers["chat"]
    assert done == "[DONE]"
