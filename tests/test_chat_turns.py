"""Fault 18: five turns of a chat by one client on the built-in model. Every turn starts from what the last one left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deltafold import ChatMessage, Completion, Engine, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24)
CHUNK = 64
QUESTIONS = [
    "Good morning. Who are you, and what were you made for? Please answer in one or two sentences.",
    "Tell me a short story about a ship at sea, an old captain who cannot sleep, and a letter that came too late.",
    "What happened to the captain after he had read the letter, and what did the sailors say to him about it?",
    "And what did the sailors do then, when the wind had turned and the land was out of sight behind them?",
    "How does the story end? Tell it in a way that a child would like to hear before it goes to sleep.",
]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """With the cache, and without."""
    with (
        Engine.load(device="cpu", max_num_seqs=1, show_progress=False) as cached,
        Engine.load(device="cpu", max_num_seqs=1, prefix_cache=False, show_progress=False) as plain,
    ):
        yield cached, plain


def test_18_from_the_second_turn_on_the_previous_prompt_is_cached(engines: tuple[Engine, Engine]) -> None:
    cached, plain = engines
    messages: list[ChatMessage] = []
    previous: Completion | None = None
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        completion = cached.chat(messages, PARAMS)
        assert completion.token_ids == plain.chat(messages, PARAMS).token_ids
        if previous is not None:
            assert completion.usage.num_cached_tokens >= previous.usage.num_prompt_tokens - CHUNK
        messages.append({"role": "assistant", "content": completion.text})
        previous = completion
    assert previous is not None
    assert previous.usage.num_cached_tokens >= 128
    assert plain.stats().num_cached_tokens == 0


def test_a_session_s_chat_computes_only_the_new_message(engines: tuple[Engine, Engine]) -> None:
    """Without any cache, and also where an answer's text would be encoded to other tokens than the model wrote: the
    second answer is letter by letter."""
    session = engines[1].session()
    letter = engines[1].encode("e")[0]
    previous: Completion | None = None
    is_respelled = []
    for i, question in enumerate(QUESTIONS[:4]):
        completion = session.chat(question, replace(PARAMS, logit_bias={letter: 100} if i == 1 else {}))
        if previous is not None:
            past = (*previous.prompt_token_ids, *previous.token_ids)
            assert completion.prompt_token_ids[: len(past)] == past
            assert completion.usage.num_cached_tokens == len(past) - 1
        rendered = engines[1].chat_token_ids(session.messages[:-1])
        assert engines[1].decode(rendered, skip_special_tokens=False) == engines[1].decode(
            completion.prompt_token_ids, skip_special_tokens=False
        )
        is_respelled.append(list(completion.prompt_token_ids) != rendered)
        previous = completion
    assert is_respelled == [False, False, True, True]
    session.close()


def test_a_session_s_chat_takes_another_answer_than_its_own(engines: tuple[Engine, Engine]) -> None:
    session = engines[1].session()
    with session.stream_chat(QUESTIONS[0], PARAMS) as stream:
        for _ in stream:
            pass
    session.add_answer("I am a clock.")
    messages: list[ChatMessage] = [*session.messages, {"role": "user", "content": QUESTIONS[1]}]
    completion = session.chat(QUESTIONS[1], PARAMS)
    assert list(completion.prompt_token_ids) == engines[1].chat_token_ids(messages)
    session.close()
