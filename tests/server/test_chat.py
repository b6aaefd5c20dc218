"""`/v1/chat/completions` over the fake engine: messages, shapes, log-probabilities, streams."""

from __future__ import annotations

import pytest
from tests.server.driving import CHAT, events, post, user
from tests.server.fake_engine import REPLY, FakeEngine

from deltafold.server.app import create_app
from deltafold.server.protocol import ChatResponse


def chat(engine: FakeEngine | None = None, **body):
    response = post(create_app(engine or FakeEngine()), CHAT, **({"messages": user("hi")} | body))
    assert response.status_code == 200, response.text
    return ChatResponse.model_validate(response.json(), strict=True).model_dump()


def stream(**body):
    response = post(create_app(FakeEngine()), CHAT, messages=user("hi"), stream=True, **body)
    return events(response.text)


def test_a_whole_answer_goes_on_to_its_end():
    body = chat()
    message = {"role": "assistant", "content": REPLY, "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(name):
    body = chat(**{name: 4})
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"


class Recording(FakeEngine):
    """Keeps the messages it was given."""

    def chat_token_ids(self, messages, **options):
        self.messages = messages
        return super().chat_token_ids(messages, **options)


def test_messages_of_every_role_reach_the_template():
    engine = Recording()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    chat(engine, messages=messages)
    expected = [dict(message) for message in messages]
    del expected[2]["content"], expected[2]["refusal"]
    assert engine.messages == expected


def test_developer_messages_are_system_messages():
    engine = Recording()
    chat(engine, messages=[{"role": "developer", "content": "s"}, *user("hi")])
    assert engine.messages[0] == {"role": "system", "content": "s"}


def test_logprobs_are_one_object_a_token_whose_bytes_make_the_text():
    choice = chat(logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"] or ()).decode() == choice["message"]["content"]
    assert content[0]["top_logprobs"] == [
        {"token": "G", "logprob": -0.5, "bytes": [71]},
        {"token": "H", "logprob": -1.5, "bytes": [72]},
    ]
    assert content[-1]["token"] == "<|control_256|>"
    assert content[-1]["bytes"] is None


def test_logprobs_without_a_number_of_alternatives():
    engine = FakeEngine()
    content = chat(engine, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert engine.submitted[0].logprobs == 0
    assert content[0]["top_logprobs"] == []


def test_a_stream_is_role_deltas_reason_usage_done():
    first, *chunks, end, usage, done = stream(stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == REPLY
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"] == chat()["usage"]
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in (first, *chunks, end, usage)} == {"chat.completion.chunk"}


def test_every_choice_of_a_stream_begins_with_its_role_and_ends_with_its_reason():
    *chunks, _ = stream(n=3, max_tokens=4)
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == "length"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == REPLY[:3]


def test_streamed_logprobs_add_up_to_the_whole_ones():
    whole = chat(logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    *chunks, _ = stream(logprobs=True, top_logprobs=1)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole
