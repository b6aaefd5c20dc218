"""The engine as a caller has it: completions, streams, aborts, threads, errors. Nothing here waits by the clock."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import NUM_RANKS, base_config, random_oracle, random_prompt, special_id
from tests.stepping import LoadedModel
from tests.straight_line import straight_line

import deltafold.api
from deltafold import (
    AsyncTokenStream,
    Completion,
    Engine,
    EngineClosedError,
    FinishReason,
    NumericalError,
    QueueFullError,
    RequestError,
    SamplingParams,
    TokenStream,
)

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=16)
LONG = replace(GREEDY, max_tokens=3000)
PROMPT = "In the beginning God created the heaven and the earth."


@pytest.fixture(autouse=True)
def _engine_is_left_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test all of the shared engine's memory is free again."""
    yield
    if "engine" in request.fixturenames:
        assert_idle(request.getfixturevalue("engine"))


def assert_idle(engine: Engine) -> None:
    """Aborts are applied before the step of a later request: once that is done, they are."""
    engine.complete_tokens([1], replace(GREEDY, max_tokens=1))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.num_free_state_slots + stats.num_cached_state_slots == stats.num_state_slots


@pytest.fixture
def own_engine(tiny_folder: Path) -> Iterator[Engine]:
    """An engine to break or close."""
    with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=4, seed=1) as loaded:
        yield loaded


def spelled(engine: Engine, text: str) -> int:
    """The id of a text that is one token."""
    (token_id,) = engine.encode(text)
    return token_id


# One prompt, several prompts


def test_complete(engine: Engine, tiny: LoadedModel) -> None:
    completion = engine.complete(PROMPT, GREEDY)
    ids = engine.encode(PROMPT)
    assert completion.prompt_token_ids == tuple(ids)
    assert list(completion.token_ids) == straight_line(tiny, ids, 16).token_ids
    assert completion.text == engine.decode(completion.token_ids)
    assert completion.index == 0
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.stop_reason is completion.error is completion.logprobs is completion.prompt_logprobs is None
    assert completion.usage.num_prompt_tokens == len(ids)
    assert completion.usage.num_output_tokens == 16


def test_complete_tokens_takes_and_gives_ids(engine: Engine) -> None:
    ids = engine.encode(PROMPT)
    completion = engine.complete_tokens(ids, GREEDY)
    assert completion.token_ids == engine.complete(PROMPT, GREEDY).token_ids
    assert engine.complete_tokens(tuple(ids), GREEDY).token_ids == completion.token_ids
    assert [c.token_ids for c in engine.complete_tokens([ids], GREEDY)] == [completion.token_ids]


def test_lists_are_answered_prompt_by_prompt_with_n_each(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=8, ignore_eos=True)
    completions = engine.complete(["Moses", "Aaron"], params)
    assert [c.index for c in completions] == [0, 1, 2, 0, 1, 2]
    assert [c.prompt_token_ids for c in completions] == [tuple(engine.encode(t)) for t in ["Moses"] * 3 + ["Aaron"] * 3]
    assert len({c.token_ids for c in completions}) == 6
    first = engine.complete("Moses", replace(params, n=1))
    assert first.token_ids == completions[0].token_ids
    assert len({c.request_id for c in completions}) == 1


def test_one_prompt_with_n_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"n=2"):
        engine.complete("Moses", SamplingParams(n=2))


def test_chat_is_the_rendered_prompt(engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who led them?"}]
    completion = engine.chat(messages, GREEDY)
    assert list(completion.prompt_token_ids) == engine.chat_token_ids(messages)
    assert special_id("<|im_user|>") in completion.prompt_token_ids
    assert completion.token_ids == engine.complete_tokens(engine.chat_token_ids(messages), GREEDY).token_ids


def test_the_same_prompt_again_starts_from_the_cache(engine: Engine) -> None:
    """Fault 3, and what usage says of it."""
    prompt = random_prompt(70, 200)
    first = engine.complete_tokens(prompt, GREEDY)
    second = engine.complete_tokens(prompt, GREEDY)
    longer = [*prompt, *first.token_ids, 5, 6, 7]
    third, fourth = (engine.complete_tokens(longer, GREEDY) for _ in range(2))
    assert (first.token_ids, third.token_ids) == (second.token_ids, fourth.token_ids)
    assert first.usage.num_cached_tokens == 0
    assert min(c.usage.num_cached_tokens for c in (second, third, fourth)) >= 128


def test_seeds(tiny_folder: Path) -> None:
    """An engine's seed makes its unseeded requests reproducible; without one they differ."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    def draws(seed: int | None) -> list[tuple[int, ...]]:
        with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=2, seed=seed) as engine:
            return [engine.complete("Moses", params).token_ids for _ in range(3)]

    first = draws(5)
    assert draws(5) == first
    assert len(set(first)) == 3
    assert draws(6) != first
    assert draws(None) != draws(None)


# Ends


def test_finish_reason_length(engine: Engine) -> None:
    """Fault 41, with `max_tokens` and with the context."""
    assert engine.complete("Moses", GREEDY).finish_reason is FinishReason.LENGTH


def test_finish_reason_length_at_the_context_limit(tiny_folder: Path) -> None:
    with Engine.load(str(tiny_folder), device="cpu", max_model_len=30) as engine:
        completion = engine.complete_tokens(random_prompt(1, 20), SamplingParams(temperature=0, ignore_eos=True))
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.num_output_tokens == 10


def test_finish_reason_stop_by_id(engine: Engine) -> None:
    free = engine.complete(PROMPT, GREEDY)
    stop = free.token_ids[4]
    completion = engine.complete(PROMPT, replace(GREEDY, stop_token_ids=[stop]))
    first = free.token_ids.index(stop)
    assert completion.token_ids == free.token_ids[: first + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == stop


def forced(engine: Engine, text: str, **changes: Any) -> SamplingParams:
    """Params under which every output token is the one that spells `text`."""
    return replace(GREEDY, logit_bias={spelled(engine, text): 100}, **changes)


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("e t", " th", 2),  # begins in one token, ends in the next
        (" the the", "", 2),
        ("the the the", " ", 3),
        ("h", " t", 1),
        (["zzz", "he t", "e the"], " t", 2),  # the one that is complete first
        (["e", "he"], " t", 1),  # of two that end together, the longer
    ],
)
def test_stop_strings_over_token_borders(engine: Engine, stop: Any, text: str, num_tokens: int) -> None:
    completion = engine.complete(PROMPT, forced(engine, " the", stop=stop))
    assert completion.text == text
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason in stop
    assert len(completion.token_ids) == num_tokens
    assert_streams_as(engine, completion, forced(engine, " the", stop=stop))


def test_a_stop_string_begun_and_not_finished_is_text(engine: Engine) -> None:
    completion = engine.complete(PROMPT, forced(engine, " the", stop=" the!", max_tokens=3))
    assert completion.text == " the the the"
    assert completion.finish_reason is FinishReason.LENGTH
    assert_streams_as(engine, completion, forced(engine, " the", stop=" the!", max_tokens=3))


def test_a_stop_string_on_the_last_token_allowed_is_a_stop(engine: Engine) -> None:
    completion = engine.complete(PROMPT, forced(engine, " the", stop="e the", max_tokens=2))
    assert (completion.text, completion.finish_reason) == (" th", FinishReason.STOP)


def assert_streams_as(engine: Engine, completion: Completion, params: SamplingParams) -> None:
    outputs = list(engine.stream(completion.prompt_token_ids, params))
    assert "".join(output.text for output in outputs) == completion.text
    assert tuple(i for output in outputs for i in output.token_ids) == completion.token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert [output.usage for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    last = outputs[-1]
    assert last.finish_reason is completion.finish_reason
    assert last.usage is not None
    assert last.usage.num_output_tokens == completion.usage.num_output_tokens


# Log-probabilities


def test_logprobs_are_the_oracle_s(engine: Engine) -> None:
    """Of prompt and output, against log_softmax of transformers' logits; penalties and bias do not touch them."""
    oracle = random_oracle(base_config(), 0)
    prompt = random_prompt(80, 100)
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2, logit_bias={9: 50}, repetition_penalty=1.3)
    completion = engine.complete_tokens(prompt, params)
    ids = [*prompt, *completion.token_ids]
    with torch.inference_mode():
        expected = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), dim=-1)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    assert len(completion.prompt_logprobs) == len(prompt)
    assert len(completion.logprobs) == len(completion.token_ids)
    for position, found in enumerate([*completion.prompt_logprobs, *completion.logprobs][1:]):
        assert found is not None
        row = expected[position]
        assert found.token_id == ids[position + 1]
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=2e-3)
        assert abs(found.rank - 1 - int((row > row[found.token_id]).sum())) <= 1
        num_top = 2 if position + 1 < len(prompt) else 3
        assert [top.logprob for top in found.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)


def test_prompt_logprobs_do_not_depend_on_the_cache_or_on_chunks(engine: Engine, tiny_folder: Path) -> None:
    prompt = random_prompt(81, 150)
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    first, second = (engine.complete_tokens(prompt, params).prompt_logprobs for _ in range(2))
    with Engine.load(str(tiny_folder), device="cpu", max_num_batched_tokens=64, prefix_cache=False) as chunked:
        third = chunked.complete_tokens(prompt, params).prompt_logprobs
    assert first is not None
    for other in (second, third):
        assert other is not None
        assert len(other) == len(first) == 150
        for a, b in zip(first[1:], other[1:], strict=True):
            assert a is not None
            assert b is not None
            assert (a.token_id, a.top, b.top) == (b.token_id, (), ())
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_logprobs_in_a_stream(engine: Engine) -> None:
    completion = engine.complete(PROMPT, replace(GREEDY, logprobs=1))
    outputs = list(engine.stream(PROMPT, replace(GREEDY, logprobs=1)))
    streamed = [entry for output in outputs for entry in output.logprobs or ()]
    assert completion.logprobs is not None
    assert [entry.token_id for entry in streamed] == [entry.token_id for entry in completion.logprobs]
    assert all(output.logprobs is None for output in engine.stream(PROMPT, GREEDY))


# Streams


def test_a_stream_is_the_completion_in_parts(engine: Engine) -> None:
    """Fault 39 on tokens of every kind: sampled output has halves of characters."""
    for seed in range(4):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True, stop=["e", "\ufffd\ufffd"])
        assert_streams_as(engine, engine.complete(PROMPT, params), params)


def test_a_stream_of_several_completions(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=6, ignore_eos=True)
    expected = engine.complete([PROMPT], params)
    outputs = list(engine.stream(PROMPT, params))
    for completion in expected:
        own = [output for output in outputs if output.index == completion.index]
        assert tuple(i for output in own for i in output.token_ids) == completion.token_ids
        assert [output.finish_reason for output in own].count(FinishReason.LENGTH) == 1
        assert own[-1].finish_reason is FinishReason.LENGTH


def test_a_stream_has_its_first_token_before_its_last_is_computed(engine: Engine) -> None:
    with engine.stream(PROMPT, LONG) as stream:
        first = next(stream)
        assert first.token_ids
        assert engine.stats().num_running == 1


def read(num_outputs: int) -> Callable[[TokenStream], None]:
    def reader(stream: TokenStream) -> None:
        for _ in range(num_outputs):
            next(stream)

    return reader


@pytest.mark.parametrize("reader", [read(0), read(3)], ids=["before the first token", "midway"])
@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_a_stream_left_early_frees_its_memory(engine: Engine, reader: Callable[[TokenStream], None], way: str) -> None:
    """Fault 13. A step after the stream is gone nothing of it is left (`assert_idle` is one step)."""
    output_tokens = engine.stats().num_output_tokens
    stream = engine.stream(PROMPT, LONG)
    reader(stream)
    if way == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert_idle(engine)
    assert engine.stats().num_output_tokens - output_tokens < 2000


def test_abort_from_another_thread(engine: Engine) -> None:
    stream = engine.stream(PROMPT, LONG, request_id="mine")
    next(stream)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(engine.abort("mine")))
    thread.start()
    outputs = list(stream)
    thread.join()
    assert answers == [True]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.num_output_tokens < 3000
    assert engine.abort("mine") is False


def test_abort_while_waiting(tiny_folder: Path) -> None:
    with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=1) as engine:
        running = engine.stream(PROMPT, LONG)
        next(running)
        waiting = engine.stream(PROMPT, LONG, request_id="waits")
        assert engine.abort("waits")
        outputs = list(waiting)
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        running.close()
        assert_idle(engine)


def test_abort_of_what_is_not_there(engine: Engine) -> None:
    assert engine.abort("nobody") is False
    done = engine.complete(PROMPT, GREEDY)
    assert engine.abort(done.request_id) is False


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    with engine.stream(PROMPT, LONG, request_id="one") as stream:
        next(stream)
        with pytest.raises(RequestError, match="one"):
            engine.stream(PROMPT, LONG, request_id="one")
        assert next(stream).request_id == "one"
    assert_idle(engine)
    assert list(engine.stream(PROMPT, GREEDY, request_id="one"))


# Coroutines


def test_async_stream(engine: Engine) -> None:
    async def collect() -> list[int]:
        return [i async for output in engine.astream(PROMPT, GREEDY) for i in output.token_ids]

    assert tuple(asyncio.run(collect())) == engine.complete(PROMPT, GREEDY).token_ids


def test_acomplete(engine: Engine) -> None:
    prompts = ["Moses", engine.encode("Aaron")]
    completions = asyncio.run(engine.acomplete(prompts, replace(GREEDY, n=2)))
    alone = engine.complete(["Moses", "Aaron"], replace(GREEDY, n=2))
    assert [(c.index, c.token_ids) for c in completions] == [(c.index, c.token_ids) for c in alone]


def test_many_coroutines_get_what_each_would_get_alone(engine: Engine) -> None:
    prompts = [random_prompt(90 + i, 1 + 17 * i) for i in range(12)]

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.acomplete([prompt], GREEDY) for prompt in prompts))

    found = [completions[0].token_ids for completions in asyncio.run(all_of_them())]
    assert found == [engine.complete_tokens(prompt, GREEDY).token_ids for prompt in prompts]


@pytest.mark.parametrize("kind", ["stream before", "stream midway", "aclose", "acomplete", "timeout"])
def test_cancelling_frees_the_memory(engine: Engine, kind: str) -> None:
    async def read_all(stream: AsyncTokenStream, started: asyncio.Event) -> None:
        async for _ in stream:
            started.set()

    async def main() -> None:
        started = asyncio.Event()
        if kind == "aclose":
            stream = engine.astream(PROMPT, LONG)
            await anext(stream)
            await stream.aclose()
            return
        if kind == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.acomplete([PROMPT], LONG), timeout=0.05)
            return
        if kind == "acomplete":
            task: asyncio.Future[Any] = asyncio.ensure_future(engine.acomplete([PROMPT] * 3, LONG))
        else:
            task = asyncio.ensure_future(read_all(engine.astream(PROMPT, LONG), started))
        if kind == "stream midway":
            await started.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_idle(engine)


def test_an_async_stream_that_is_dropped_frees_its_memory(engine: Engine) -> None:
    async def drop() -> None:
        stream = engine.astream(PROMPT, LONG)
        await anext(stream)
        del stream
        gc.collect()
        await engine.acomplete([[1]], replace(GREEDY, max_tokens=1))
        assert engine.stats().num_running == 0

    asyncio.run(drop())


def test_an_event_loop_that_ends_does_not_harm_the_engine(engine: Engine) -> None:
    async def leave() -> AsyncTokenStream:
        stream = engine.astream(PROMPT, LONG)
        await anext(stream)
        return stream

    stream = asyncio.run(leave())
    assert engine.complete(PROMPT, GREEDY).finish_reason is FinishReason.LENGTH
    del stream
    gc.collect()


# Threads


def test_threads_get_what_each_would_get_alone(engine: Engine) -> None:
    prompts = [random_prompt(110 + i, 1 + 23 * i) for i in range(8)]
    found: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        found[i] = engine.complete_tokens(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == [engine.complete_tokens(prompt, GREEDY).token_ids for prompt in prompts]


def test_threads_that_submit_and_abort_leak_nothing(engine: Engine) -> None:
    """Fault 11 through the front door."""

    def work(i: int) -> None:
        for round_ in range(6):
            stream = engine.stream(random_prompt(i, 1 + 30 * i), LONG)
            for _ in range((i + round_) % 3):
                next(stream)
            if round_ % 2:
                engine.abort(stream.request_id)
                assert list(stream)[-1].finish_reason is FinishReason.ABORT
            else:
                stream.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_idle(engine)


# Errors while running


@pytest.fixture
def poisoned(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine to which one token, the last ordinary one, is NaN."""
    real = deltafold.api.load_tensors

    def load_and_poison(*args: Any, **kwargs: Any) -> Any:
        tensors = real(*args, **kwargs)
        tensors["model.embed_tokens.weight"][NUM_RANKS - 1] = float("nan")
        return tensors

    monkeypatch.setattr(deltafold.api, "load_tensors", load_and_poison)
    with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=4) as engine:
        yield engine


def test_nan_logits_end_that_request_with_an_error_that_holds_the_others(poisoned: Engine, engine: Engine) -> None:
    good = random_prompt(120, 70)
    bad = [*good, NUM_RANKS - 1]
    with pytest.raises(NumericalError) as caught:
        poisoned.complete_tokens([good, bad, good], GREEDY)
    completions = caught.value.completions
    assert [c.finish_reason for c in completions] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert completions[0].token_ids == completions[2].token_ids == engine.complete_tokens(good, GREEDY).token_ids
    assert completions[1].token_ids == ()
    with pytest.raises(NumericalError, match="not finite"):
        list(poisoned.stream(bad, GREEDY))
    with pytest.raises(NumericalError):
        asyncio.run(poisoned.acomplete([bad], GREEDY))
    with pytest.raises(NumericalError):
        poisoned.complete_tokens(bad, replace(GREEDY, prompt_logprobs=1))
    assert poisoned.is_alive
    assert_idle(poisoned)
    assert poisoned.complete_tokens(good, GREEDY).token_ids == completions[0].token_ids


def test_nan_of_one_request_is_not_handed_on_by_the_prefix_cache(poisoned: Engine, engine: Engine) -> None:
    """Blocks and snapshots computed from NaN must not be what a later prompt starts from, nor its slot."""
    start = [*random_prompt(121, 100), NUM_RANKS - 1, *random_prompt(122, 60)]
    with pytest.raises(NumericalError):
        poisoned.complete_tokens(start, GREEDY)
    for num_tokens in (64, 70, 90):
        prompt = start[:num_tokens]
        assert poisoned.complete_tokens(prompt, GREEDY).token_ids == engine.complete_tokens(prompt, GREEDY).token_ids


def test_out_of_memory_once_is_survived(own_engine: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 12 through the front door."""
    break_forward(own_engine, monkeypatch, {3: torch.OutOfMemoryError("injected"), 6: MemoryError("injected")})
    assert own_engine.complete(PROMPT, GREEDY).token_ids == engine.complete(PROMPT, GREEDY).token_ids
    assert own_engine.is_alive
    assert own_engine.stats().num_preemptions == 2
    assert_idle(own_engine)


def break_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch, errors: dict[int, BaseException]) -> None:
    """Makes the numbered forwards raise, after they have written."""
    model: Any = engine._core.runner._model
    real, calls = model.forward, iter(range(1, 10**6))

    def forward(*args: Any) -> Any:
        hidden = real(*args)
        if (error := errors.get(next(calls))) is not None:
            raise error
        return hidden

    monkeypatch.setattr(model, "forward", forward)


def test_a_defect_in_a_step_reaches_every_caller_and_ends_the_engine(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = KeyError("a defect")
    streams = [own_engine.stream(PROMPT, LONG) for _ in range(3)]
    next(streams[0])
    break_forward(own_engine, monkeypatch, {1: defect})
    for stream in streams:
        with pytest.raises(EngineClosedError, match="a defect") as caught:
            list(stream)
        assert caught.value.__cause__ is defect
    assert not own_engine.is_alive
    with pytest.raises(EngineClosedError) as caught:
        own_engine.complete(PROMPT, GREEDY)
    assert caught.value.__cause__ is defect
    own_engine.close()


def test_max_waiting(tiny_folder: Path) -> None:
    with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=1, max_waiting=2) as engine:
        running = engine.stream(PROMPT, LONG)
        next(running)
        waiting = [engine.stream(PROMPT, LONG) for _ in range(2)]
        with pytest.raises(QueueFullError, match=r"\b2\b"):
            engine.stream(PROMPT, LONG)
        with pytest.raises(QueueFullError):
            engine.complete(PROMPT, GREEDY)
        for stream in waiting:
            engine.abort(stream.request_id)
            assert list(stream)[-1].finish_reason is FinishReason.ABORT
        running.close()
        assert_idle(engine)


# Ends of the engine


def test_close_is_idempotent_and_ends_what_runs(own_engine: Engine) -> None:
    stream = own_engine.stream(PROMPT, LONG)
    next(stream)
    assert own_engine.is_alive
    own_engine.close()
    own_engine.close()
    assert not own_engine.is_alive
    with pytest.raises(EngineClosedError):
        list(stream)
    assert list(stream) == []


def test_a_closed_engine_refuses_work_and_still_describes_itself(own_engine: Engine) -> None:
    own_engine.close()
    for call in (
        lambda: own_engine.complete(PROMPT),
        lambda: own_engine.complete_tokens([1]),
        lambda: own_engine.chat([{"role": "user", "content": "x"}]),
        lambda: own_engine.stream(PROMPT),
        lambda: asyncio.run(own_engine.acomplete([PROMPT])),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            call()
    assert own_engine.abort("x") is False
    assert json.dumps(own_engine.describe())
    assert own_engine.stats().num_running == 0


def test_closing_wakes_a_thread_that_waits(own_engine: Engine) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            own_engine.complete(PROMPT, LONG)
        except EngineClosedError as error:
            caught.append(error)

    blocker = own_engine.stream(PROMPT, LONG)
    next(blocker)
    thread = threading.Thread(target=wait)
    thread.start()
    next(blocker)
    own_engine.close()
    thread.join()
    assert len(caught) == 1


def test_leaving_the_with_block_closes(tiny_folder: Path) -> None:
    with pytest.raises(KeyError), Engine.load(str(tiny_folder), device="cpu", max_num_seqs=1) as engine:
        raise KeyError
    assert not engine.is_alive


# What it says of itself


def test_describe_says_what_was_resolved(engine: Engine) -> None:
    report = engine.describe()
    assert json.loads(json.dumps(report)) == report
    assert (report["device"], report["dtype"], report["residual_dtype"]) == ("cpu", "float32", "float32")
    assert report["backend"] == "portable"
    assert report["api_version"] == 1
    assert report["limits"]["max_num_seqs"] == 8
    assert report["limits"]["max_model_len"] == engine.max_model_len
    assert report["model"]["vocab_size"] == engine.vocab_size
    assert report["memory"]["allocated_bytes"] == report["memory"]["planned_bytes"] <= report["memory"]["budget"]


def test_stats_count(own_engine: Engine) -> None:
    before = own_engine.stats()
    own_engine.complete_tokens([random_prompt(130, 70), random_prompt(131, 5)], GREEDY)
    after = own_engine.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 75
    assert after.num_output_tokens - before.num_output_tokens == 32
    assert after.num_steps > before.num_steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_dtypes(tiny_folder: Path, dtype: Any, residual_dtype: Any) -> None:
    options = {"dtype": dtype, "residual_dtype": residual_dtype, "max_num_seqs": 2}
    with Engine.load(str(tiny_folder), device="cpu", **options) as engine:
        assert engine.describe()["dtype"] == dtype
        assert engine.describe()["residual_dtype"] == residual_dtype
        both = engine.complete_tokens([random_prompt(140, 130), random_prompt(141, 3)], GREEDY)
        assert [len(set(c.token_ids)) > 4 for c in both] == [True, True]
