"""`/v1/completions` over the fake engine: shapes, order, echo, log-probabilities, streams."""

from __future__ import annotations

import pytest
from tests.server.driving import COMPLETIONS, events, post
from tests.server.fake_engine import REPLY, FakeEngine

from deltafold.server.app import create_app
from deltafold.server.protocol import CompletionResponse


def complete(engine: FakeEngine | None = None, **body):
    response = post(create_app(engine or FakeEngine()), COMPLETIONS, **body)
    assert response.status_code == 200, response.text
    return CompletionResponse.model_validate(response.json(), strict=True).model_dump()


def stream(engine: FakeEngine | None = None, **body):
    response = post(create_app(engine or FakeEngine()), COMPLETIONS, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_a_whole_completion():
    body = complete(prompt="hi", max_tokens=100)
    assert body["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]
    num_tokens = len(REPLY.encode()) + 1  # the end token counts and does not show
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == num_tokens
    assert body["usage"]["total_tokens"] == 2 + num_tokens
    assert body["id"].startswith("cmpl-")


def test_max_tokens_is_16_unless_given():
    body = complete(prompt="hi")
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompts", [["a", "bc"], [[97], [98, 99]]])
def test_several_prompts_with_n_come_prompt_by_prompt(prompts):
    body = complete(prompt=prompts, n=2, echo=True, max_tokens=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["aG", "aG", "bcG", "bcG"]
    assert body["usage"]["prompt_tokens"] == 3  # not once per choice
    assert body["usage"]["completion_tokens"] == 4


def test_stop_strings_end_the_text():
    choice = complete(prompt="hi", stop=["is all", "nowhere"], max_tokens=100)["choices"][0]
    assert choice["text"] == "Grüße, 世界! That "
    assert choice["finish_reason"] == "stop"


FIELDS = {
    "max_tokens": 3, "n": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": -7, "stop": ("x",), "stop_token_ids": (5,),
    "ignore_eos": True, "logprobs": 2, "logit_bias": {7: -1.5},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_every_sampling_field_reaches_the_engine(name):
    engine = FakeEngine()
    value = FIELDS[name]
    sent = {"7": -1.5} if name == "logit_bias" else list(value) if isinstance(value, tuple) else value
    complete(engine, prompt="hi", **{name: sent})
    assert getattr(engine.submitted[0], name) == value


def test_null_fields_are_as_if_not_sent():
    engine = FakeEngine()
    complete(engine, prompt="hi", **dict.fromkeys([*FIELDS, "model", "user", "stream", "stream_options", "echo"]))
    complete(engine, prompt="hi")
    assert engine.submitted[0] == engine.submitted[1]


def test_logprobs_are_lists_side_by_side_with_offsets_into_the_text():
    choice = complete(prompt="hi", logprobs=2, max_tokens=100)["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert logprobs["tokens"][:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs["tokens"][-1] == "<|control_256|>"
    assert logprobs["text_offset"][:5] == [0, 1, 2, 2, 3]
    assert logprobs["text_offset"][-1] == len(text)
    assert logprobs["top_logprobs"][0] == {"G": -0.5, "H": -1.5}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<|control")) or text[offset] == token


def test_no_top_logprobs_still_shows_the_chosen_token():
    logprobs = complete(prompt="hi", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"G": -0.5}, {"r": -0.5}]


@pytest.mark.parametrize("prompt", ["ß?", list("ß?".encode())])
def test_echo_with_logprobs_covers_prompt_and_output(prompt):
    choice = complete(prompt=prompt, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "ß?Gr"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\x9f", "?", "G", "r"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]


def test_echo_without_output_scores_the_prompt():
    body = complete(prompt="abc", echo=True, logprobs=1, max_tokens=0)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0


def test_a_stream_adds_up_to_the_whole_text():
    *chunks, done = stream(prompt="hi", max_tokens=100)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)


def test_a_stream_carries_what_json_and_events_must_escape():
    reply = 'say "x"\n\n\\data: \t\u2028\x00 end'
    *chunks, _ = stream(FakeEngine(reply=reply), prompt="hi", max_tokens=100)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply


def test_usage_comes_last_if_asked_for():
    *chunks, last, done = stream(prompt="hi", max_tokens=3, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"] == complete(prompt="hi", max_tokens=3)["usage"]


def test_a_stream_of_several_prompts_keeps_its_choices_apart():
    body = {"prompt": ["a", "bc", "d"], "n": 2, "echo": True, "max_tokens": 9}
    *chunks, last, _ = stream(**body, stream_options={"include_usage": True})
    texts, reasons = [""] * 6, [None] * 6
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    whole = complete(**body)
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length"] * 6
    assert last["usage"] == whole["usage"]


def test_streamed_logprobs_add_up_to_the_whole_ones():
    whole = complete(prompt="hi", logprobs=1, max_tokens=100)["choices"][0]["logprobs"]
    *chunks, _ = stream(prompt="hi", logprobs=1, max_tokens=100)
    for name, values in whole.items():
        assert [x for chunk in chunks for x in (chunk["choices"][0]["logprobs"] or {name: []})[name]] == values


def test_a_streamed_echo_without_output_ends_at_once():
    *chunks, done = stream(prompt="abc", echo=True, max_tokens=0)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abc", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
