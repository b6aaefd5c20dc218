"""Sessions, forks and their files through the engine: same tokens, bit-equal logprobs, refusals by name, no leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tests.checkpoints import base_config, random_prompt, write_checkpoint
from tests.stepping import PLACE

from deltafold import (
    Completion,
    ContextLengthError,
    DeltafoldWarning,
    Engine,
    EngineClosedError,
    FinishReason,
    QueueFullError,
    RequestError,
    SamplingParams,
    Session,
    SessionError,
    UnsupportedOptionError,
)

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, logprobs=3)
TURNS = [random_prompt(0, 100), random_prompt(1, 30), random_prompt(2, 70)]


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(Engine.load(str(tiny_folder), **{**PLACE.options, "max_num_seqs": 4, "seed": 0, **options}))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine._core.scheduler.check()


@pytest.fixture(scope="module")
def cold(tiny_folder: Path) -> list[Completion]:
    """Each turn after all before it, computed from the first token on."""
    with Engine.load(str(tiny_folder), max_num_seqs=1, prefix_cache=False, seed=0, **PLACE.options) as engine:
        prompt: list[int] = []
        completions = []
        for turn in TURNS:
            completions.append(engine.complete_tokens([*prompt, *turn], GREEDY))
            prompt = [*completions[-1].prompt_token_ids, *completions[-1].token_ids]
    return completions


def lead(session: Session, first: int = 0, last: int = 3) -> list[Completion]:
    return [session.complete(turn, GREEDY) for turn in TURNS[first:last]]


def host_bytes(engine: Engine) -> int:
    """After a step has been made for the loop's pending moves: entries and their budget agree."""
    engine._loop.call(lambda: None)
    engine._loop.call(lambda: None)
    held = set(engine._core.scheduler.cache.host._entries)
    assert set(engine._core.runner.host._entries) == held
    return engine.stats().num_host_bytes


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_session_gives_the_tokens_of_a_cold_run(
    make_engine: Callable[..., Engine], cold: list[Completion], prefix_cache: bool
) -> None:
    session = make_engine(prefix_cache=prefix_cache).session()
    completions = lead(session)
    assert [c.token_ids for c in completions] == [c.token_ids for c in cold]
    assert [c.prompt_token_ids for c in completions] == [c.prompt_token_ids for c in cold]
    assert [c.usage.num_cached_tokens for c in completions] == [0, 111, 153]
    assert session.token_ids == (*cold[2].prompt_token_ids, *cold[2].token_ids)
    assert session.num_saved_tokens == len(session.token_ids) - 1


def test_a_fork_goes_on_bit_for_bit_and_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(prefix_cache=False)
    session = engine.session()
    lead(session, 0, 2)
    held = host_bytes(engine)
    fork = engine.fork(session)
    assert host_bytes(engine) == held  # shared, not copied
    other = fork.complete(random_prompt(9, 40), GREEDY)
    assert other.usage.num_cached_tokens == 153
    last = lead(session, 2)[0]
    again = session.fork()
    assert engine.fork(again).token_ids == session.token_ids
    fork.close()
    twin = engine.session()
    lead(twin, 0, 2)
    assert lead(twin.fork(), 2)[0].logprobs == last.logprobs == lead(twin, 2)[0].logprobs


def test_forks_of_one_past_do_not_change_each_other(make_engine: Callable[..., Engine], cold: list[Completion]) -> None:
    """Their requests run in the same steps."""
    session = make_engine().session()
    lead(session, 0, 2)
    forks = [session.fork() for _ in range(3)]
    streams = [fork.stream(turn, GREEDY) for fork, turn in zip(forks, (TURNS[2], [5], TURNS[0]), strict=True)]
    outputs = [[token for output in stream for token in output.token_ids] for stream in streams]
    assert outputs[0] == list(cold[2].token_ids)
    assert len({tuple(ids) for ids in outputs}) == 3
    assert lead(session, 2)[0].token_ids == cold[2].token_ids


CHILD = """
import json, sys
from deltafold import Engine, SamplingParams
folder, path, turn = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with Engine.load(folder, max_num_seqs=4, seed=0, **json.loads(sys.argv[4])) as engine:
    session = engine.restore(path)
    completion = session.complete(turn, SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, logprobs=3))
    values = [[t.logprob.hex(), *(top.logprob.hex() for top in t.top)] for t in completion.logprobs]
    print(json.dumps([completion.token_ids, values, completion.usage.num_cached_tokens, session.token_ids]))
"""


def test_saved_and_restored_in_a_new_process_it_goes_on_bit_for_bit(
    make_engine: Callable[..., Engine], tiny_folder: Path, cold: list[Completion], tmp_path: Path
) -> None:
    session = make_engine().session()
    lead(session, 0, 2)
    session.save(tmp_path / "past")
    assert [path.name for path in tmp_path.iterdir()] == ["past"]
    last = lead(session, 2)[0]
    arguments = [str(tiny_folder), str(tmp_path / "past"), json.dumps(TURNS[2]), json.dumps(PLACE.options)]
    command = [sys.executable, "-c", CHILD, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    token_ids, values, num_cached, all_ids = json.loads(done.stdout)
    assert tuple(token_ids) == last.token_ids == cold[2].token_ids
    assert last.logprobs is not None
    assert values == [[t.logprob.hex(), *(top.logprob.hex() for top in t.top)] for t in last.logprobs]
    assert num_cached == 153
    assert tuple(all_ids) == session.token_ids


def test_a_file_holds_the_conversation_and_can_be_written_again(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine()
    session = engine.session()
    session.add_message({"role": "system", "content": "Be brief."})
    session.chat("Good day", GREEDY)
    session.save(tmp_path / "a")
    restored = engine.restore(tmp_path / "a")
    assert restored.messages == session.messages
    assert [m["role"] for m in restored.messages] == ["system", "user", "assistant"]
    assert restored.token_ids == session.token_ids
    first = session.chat("And you?", GREEDY)
    assert restored.chat("And you?", GREEDY).token_ids == first.token_ids
    restored.save(tmp_path / "a")
    assert engine.restore(tmp_path / "a").messages == session.messages


def test_an_empty_session_can_be_saved_and_restored(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    engine.session().save(tmp_path / "a")
    restored = engine.restore(tmp_path / "a")
    assert (restored.token_ids, restored.messages, restored.num_saved_tokens) == ((), (), 0)


@pytest.fixture(scope="module")
def saved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session's file."""
    path = tmp_path_factory.mktemp("session") / "past"
    with Engine.load(str(tiny_folder), max_num_seqs=1, seed=0, **PLACE.options) as engine:
        session = engine.session()
        session.complete(TURNS[0][:70], replace(GREEDY, max_tokens=3))
        session.save(path)
    return path


def test_another_model_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, base_config(), seed=1)
    with Engine.load(str(tmp_path), max_num_seqs=1, **PLACE.options) as engine, pytest.raises(SessionError) as caught:
        engine.restore(saved)
    assert "fingerprint" in str(caught.value)
    assert engine.describe()["model"]["fingerprint"] in str(caught.value)


def test_another_dtype_is_refused_by_name(make_engine: Callable[..., Engine], saved: Path) -> None:
    with pytest.raises(SessionError, match=r"dtype is 'float32', this engine has 'bfloat16'"):
        make_engine(dtype="bfloat16").restore(saved)


def test_another_format_is_refused_by_name(engine: Engine, saved: Path, tmp_path: Path) -> None:
    rewrite(saved, tmp_path / "other", format="deltafold-session-0")
    with pytest.raises(SessionError, match=r"format is 'deltafold-session-0', this engine has 'deltafold-session-1'"):
        engine.restore(tmp_path / "other")


def rewrite(source: Path, target: Path, **metadata: str) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        save_file(tensors, target, metadata=file.metadata() | metadata)


@pytest.mark.parametrize("change", [{"num_saved_tokens": "71"}, {"num_saved_tokens": "x"}, {"messages": "["}])
def test_changed_metadata_is_refused(engine: Engine, saved: Path, tmp_path: Path, change: dict[str, str]) -> None:
    rewrite(saved, tmp_path / "other", **change)
    with pytest.raises(SessionError, match="damaged"):
        engine.restore(tmp_path / "other")


def test_a_file_with_any_byte_flipped_is_refused(engine: Engine, saved: Path, tmp_path: Path) -> None:
    """Every fifth byte of the head, every 397th of the rest."""
    content, damaged = bytearray(saved.read_bytes()), tmp_path / "damaged"
    head = 8 + int.from_bytes(content[:8], "little")
    before = host_bytes(engine)
    for i in [*range(8), *range(8, head, 5), *range(head, len(content), 397), len(content) - 1]:
        content[i] ^= 0x10
        damaged.write_bytes(content)
        with pytest.raises(SessionError, match="damaged"):
            engine.restore(damaged)
        content[i] ^= 0x10
    assert host_bytes(engine) == before
    damaged.write_bytes(content)
    engine.restore(damaged).close()


def test_a_file_cut_short_is_refused(engine: Engine, saved: Path, tmp_path: Path) -> None:
    content, damaged = saved.read_bytes(), tmp_path / "damaged"
    for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:length])
        with pytest.raises(SessionError, match="damaged"):
            engine.restore(damaged)


def test_paths_that_cannot_be_read_or_written_are_named(engine: Engine, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="nowhere"):
        engine.restore(tmp_path / "nowhere")
    with pytest.raises(SessionError, match="cannot be read"):
        engine.restore(tmp_path)
    with pytest.raises(SessionError, match=r"nowhere.* cannot be written"):
        engine.session().save(tmp_path / "nowhere" / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_busy_session_takes_nothing_else(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    session = engine.session()
    stream = session.stream(TURNS[0], GREEDY)
    next(stream)
    attempts: list[Callable[[], object]] = [
        lambda: session.complete(TURNS[1], GREEDY),
        lambda: session.stream(TURNS[1], GREEDY),
        lambda: session.save(tmp_path / "a"),
        lambda: engine.fork(session),
        session.close,
    ]
    for attempt in attempts:
        with pytest.raises(RequestError, match="not finished"):
            attempt()
    rest = list(stream)
    assert rest[-1].finish_reason is FinishReason.LENGTH
    session.close()


def test_what_a_session_cannot_do_is_refused_and_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_model_len=256)
    session = engine.session()
    lead(session, 0, 1)
    before = (session.token_ids, session.num_saved_tokens, host_bytes(engine))
    with pytest.raises(RequestError, match="n must be 1"):
        session.complete([1], replace(GREEDY, n=2))
    with pytest.raises(UnsupportedOptionError, match="prompt_logprobs"):
        session.complete([1], replace(GREEDY, prompt_logprobs=0))
    with pytest.raises(ContextLengthError):
        session.complete(random_prompt(0, 200), GREEDY)
    with pytest.raises(RequestError):
        session.complete([-1], GREEDY)
    with pytest.raises(RequestError):
        session.stream_chat({"role": "nobody", "content": "?"}, GREEDY)
    assert (session.token_ids, session.num_saved_tokens, host_bytes(engine)) == before
    assert session.messages == ()
    assert session.complete([1], GREEDY).usage.num_cached_tokens == before[1]


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_stream_closed_early_keeps_what_was_computed(make_engine: Callable[..., Engine], num_read: int) -> None:
    engine = make_engine(prefix_cache=False)
    session = engine.session()
    lead(session, 0, 1)
    stream = session.stream(TURNS[1], replace(GREEDY, max_tokens=200))
    for _ in range(num_read):
        next(stream)
    stream.close()
    stream.close()
    assert engine.stats().num_running == 0
    past = session.token_ids
    assert past[:142] == (*TURNS[0], *past[100:112], *TURNS[1])
    assert session.num_saved_tokens >= (111 if num_read == 0 else 142 + num_read - 1)
    following = session.complete(TURNS[2], GREEDY)
    assert following.usage.num_cached_tokens > 110
    assert following.token_ids == engine.complete_tokens([*past, *TURNS[2]], GREEDY).token_ids


def test_a_dropped_stream_frees_its_session(make_engine: Callable[..., Engine]) -> None:
    session = make_engine().session()
    stream = session.stream(TURNS[0], replace(GREEDY, max_tokens=200))
    next(stream)
    del stream
    assert session.complete(TURNS[1], GREEDY).usage.num_output_tokens == 12


def test_a_request_aborted_by_its_id_while_it_waits(make_engine: Callable[..., Engine], cold: list[Completion]) -> None:
    """One slot, taken by another: the session's request never starts, and its state is not lost."""
    engine = make_engine(max_num_seqs=1)
    session = engine.session()
    lead(session, 0, 2)
    held = host_bytes(engine)
    with engine.stream(TURNS[0], replace(GREEDY, max_tokens=3000)) as other:
        next(other)
        stream = session.stream([7, 8, 9], GREEDY)
        assert engine.abort(stream.request_id)
        outputs = list(stream)
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    assert (session.num_saved_tokens, host_bytes(engine)) == (153, held)
    session.close()
    assert host_bytes(engine) == len(engine._core.scheduler.cache._in_host) * engine._plan.bytes_per_slot


def test_closing_gives_every_byte_back(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_snapshots=0)
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        lead(session, 0, 2)
    sessions += [session.fork() for session in sessions]
    sessions[4].complete(TURNS[2], GREEDY)
    assert host_bytes(engine) > 0
    for session in sessions:
        session.close()
        session.close()
    assert host_bytes(engine) == 0
    assert not engine._core.runner.host._entries
    assert sessions[0].complete([1], GREEDY).usage.num_cached_tokens == 0  # closed, it still knows its tokens


def test_without_host_memory_a_session_computes_again(
    make_engine: Callable[..., Engine], cold: list[Completion]
) -> None:
    session = make_engine(host_memory=0, prefix_cache=False).session()
    completions = lead(session)
    assert [c.token_ids for c in completions] == [c.token_ids for c in cold]
    assert [c.usage.num_cached_tokens for c in completions] == [0, 0, 0]


def test_with_memory_for_the_first_turn_only_the_rest_is_computed_again(
    make_engine: Callable[..., Engine], cold: list[Completion]
) -> None:
    probe = make_engine()
    first = probe.session()
    lead(first, 0, 1)
    engine = make_engine(host_memory=host_bytes(probe), prefix_cache=False)
    completions = lead(engine.session())
    assert [c.token_ids for c in completions] == [c.token_ids for c in cold]
    assert [c.usage.num_cached_tokens for c in completions] == [0, 111, 111]


def test_restoring_without_room_warns_and_computes_again(
    make_engine: Callable[..., Engine], cold: list[Completion], tmp_path: Path
) -> None:
    session = make_engine().session()
    lead(session, 0, 2)
    session.save(tmp_path / "a")
    engine = make_engine(host_memory=1000)
    with pytest.warns(DeltafoldWarning, match=r"no host memory.*153 tokens"):
        restored = engine.restore(tmp_path / "a")
    completion = lead(restored, 2)[0]
    assert (completion.token_ids, completion.usage.num_cached_tokens) == (cold[2].token_ids, 0)
    assert host_bytes(engine) == 0


@pytest.mark.parametrize("host_memory", [10**7, 0])
def test_a_session_is_preempted_like_any_request(
    make_engine: Callable[..., Engine], cold: list[Completion], host_memory: int
) -> None:
    """Blocks for one and a half: the session's request is saved, or computed again, and gives the same tokens."""
    plan = make_engine()._plan
    engine = make_engine(
        max_num_seqs=2,
        memory=2 * plan.bytes_per_slot + 6 * plan.bytes_per_block,
        max_snapshots=0,
        host_memory=host_memory,
        max_model_len=320,
    )
    session = engine.session()
    lead(session, 0, 2)
    with engine.stream(random_prompt(5, 60), replace(GREEDY, max_tokens=75)) as other:
        next(other)
        stream = session.stream(TURNS[2], replace(GREEDY, max_tokens=50))
        token_ids = [token for output in stream for token in output.token_ids]
        for _ in other:
            pass
    assert token_ids[:12] == list(cold[2].token_ids)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_saved_preemptions > 0) == (host_memory > 0)


def test_open_sessions_survive_their_engine(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    idle, busy = engine.session(), engine.session()
    lead(idle, 0, 1)
    stream = busy.stream(TURNS[0], replace(GREEDY, max_tokens=2000))
    next(stream)
    engine.close()
    stream.close()
    for session in (idle, busy):
        with pytest.raises(EngineClosedError):
            session.complete(TURNS[1], GREEDY)
    idle.save(tmp_path / "a")
    idle.close()
    busy.close()
    restored = make_engine().restore(tmp_path / "a")
    assert restored.token_ids == idle.token_ids
    assert restored.num_saved_tokens == 111


def test_a_full_queue_refuses_a_session_s_request_and_leaves_it_idle(make_engine: Callable[..., Engine]) -> None:
    session = make_engine(max_waiting=0).session()
    with pytest.raises(QueueFullError):
        session.complete(TURNS[0], GREEDY)
    session.close()
    assert session.token_ids == ()


def test_host_memory_that_fails_costs_the_state_and_no_more(
    make_engine: Callable[..., Engine], cold: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(prefix_cache=False)
    session = engine.session()
    lead(session, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("deltafold.cache.host_store._to_host", lambda _: (_ for _ in ()).throw(MemoryError("injected")))
        second = session.complete(TURNS[1], GREEDY)
    assert (second.token_ids, session.num_saved_tokens) == (cold[1].token_ids, 111)
    third = session.complete(TURNS[2], GREEDY)
    assert (third.token_ids, third.usage.num_cached_tokens) == (cold[2].token_ids, 111)
    session.close()
    assert host_bytes(engine) == 0


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_step_out_of_memory_does_not_harm_a_session(
    make_engine: Callable[..., Engine], cold: list[Completion], failing: int
) -> None:
    """The first step restores the saved state, the last ones decode."""
    engine = make_engine(prefix_cache=False)
    session = engine.session()
    lead(session, 0, 1)
    launch, calls = engine._core.runner.launch, iter(range(1, 1000))

    def sometimes(output: object) -> object:
        step = launch(output)  # type: ignore[arg-type]
        if next(calls) == failing:
            raise MemoryError("injected")
        return step

    engine._core._runner.launch = sometimes  # type: ignore[method-assign, assignment]
    assert [c.token_ids for c in lead(session, 1)] == [c.token_ids for c in cold[1:]]
    session.close()
    assert host_bytes(engine) == 0


def test_a_session_whose_request_fails_keeps_its_past(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(prefix_cache=False)
    session = engine.session()
    lead(session, 0, 1)
    launch = engine._core.runner.launch

    def failing(output: object) -> object:
        raise MemoryError("injected")

    engine._core._runner.launch = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="out of memory"):
        session.complete(TURNS[1], GREEDY)
    engine._core._runner.launch = launch  # type: ignore[method-assign]
    assert session.num_saved_tokens == 111
    past = session.token_ids
    following = session.complete([3], GREEDY)
    assert following.usage.num_cached_tokens == 111
    assert following.token_ids == engine.complete_tokens([*past, 3], GREEDY).token_ids


def test_chat_continues_from_its_state(make_engine: Callable[..., Engine]) -> None:
    session = make_engine().session()
    usages = [session.chat(message, GREEDY).usage for message in ("Good day", "And you?", "Why?")]
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 3
    assert usages[0].num_cached_tokens == 0
    assert usages[1].num_prompt_tokens > usages[0].num_prompt_tokens + usages[0].num_output_tokens


def test_a_dropped_stream_leaves_the_session_as_it_was(make_engine) -> None:
    """Also where the collector runs on the engine's thread: dropping must not wait."""
    engine = make_engine()
    session = engine.session()
    before = session.complete(random_prompt(90, 70), SamplingParams(max_tokens=4, temperature=0)).token_ids
    tokens = session.token_ids
    stream = session.stream(random_prompt(91, 30), SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    next(stream)
    engine._loop.call(stream.__del__)
    assert session.token_ids == tokens
    assert len(before) == 4
    assert session.complete([], SamplingParams(max_tokens=2, temperature=0)).usage.num_output_tokens == 2
