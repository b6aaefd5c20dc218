"""Every architecture on the same runner: equivalences and faults that `test_equivalence.py`, `test_faults.py`,
`test_prefix_reuse.py` and `test_sessions.py` put to Kimi-Linear in full, on checkpoints made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoints import random_prompt
from tests.siblings import BASE, WRITERS, write_wrapped
from tests.stepping import GREEDY, PLACE, LoadedModel, Stepper, cache_tensors, load_model, poison
from tests.straight_line import Run, straight_line, token_by_token
from tests.test_prefix_reuse import FreshStates, assert_close, check_snapshots, make_stepper, preempted_run
from torch import Tensor

from deltafold import Engine, SamplingParams, UnsupportedOptionError
from deltafold.cache.memory import LayerCache
from deltafold.checkpoint.weights import random_tensors
from deltafold.layers.batch import ForwardBatch
from deltafold.models import model_class
from deltafold.ops import PAD_SLOT, Ops, select
from deltafold.parity.trace import trace
from deltafold.scheduler.request import Request

LENGTHS = (1, 64, 65, 200)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
NUM_NEW = 12
PARAMS = replace(GREEDY, max_tokens=NUM_NEW)
HYBRIDS = [name for name in BASE if name.startswith("Qwen")]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            WRITERS[architecture](made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="module", params=sorted(BASE))
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> LoadedModel:
    """Those with recurrent state."""
    return load_model(folder_of(request.param))


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Run]:
    return [straight_line(loaded, prompt, NUM_NEW) for prompt in PROMPTS]


def assert_equal_runs(stepper: Stepper, requests: list[Request], runs: list[Run]) -> None:
    for request, run in zip(requests, runs, strict=True):
        assert request.output_token_ids == run.token_ids, f"prompt of {request.num_prompt_tokens} tokens"
        assert_close([stepper.logits_of(request)], [run.logits])


def run_all(stepper: Stepper) -> list[Request]:
    requests = [stepper.add(prompt, PARAMS) for prompt in PROMPTS]
    stepper.run()
    return requests


def test_alone_is_bit_identical_to_the_straight_line(loaded: LoadedModel, alone: list[Run]) -> None:
    assert len({tuple(run.token_ids[:4]) for run in alone}) == len(alone)
    for prompt, run in zip(PROMPTS, alone, strict=True):
        stepper = Stepper(loaded)
        request = stepper.add(prompt, PARAMS)
        stepper.run()
        assert torch.equal(stepper.logits_of(request), run.logits)


@pytest.mark.parametrize("budget", [64, 2048])
def test_together_and_in_chunks_equals_alone(loaded: LoadedModel, alone: list[Run], budget: int) -> None:
    """Faults 9 and 10."""
    stepper = Stepper(loaded, max_num_batched_tokens=budget)
    assert_equal_runs(stepper, run_all(stepper), alone)


@pytest.mark.parametrize("saves", [False, True])
def test_preempted_for_want_of_blocks_equals_alone(loaded: LoadedModel, saves: bool) -> None:
    """Three requests of a block each, which soon need two, and there are four."""
    prompts = [random_prompt(20 + i, length) for i, length in enumerate((60, 61, 62))]
    saving = {"host_memory": 2**24, "save_bytes_per_token": 2**20} if saves else {}
    stepper = Stepper(loaded, num_blocks=4, **saving)
    requests = [stepper.add(prompt, PARAMS) for prompt in prompts]
    stepper.run()
    assert_equal_runs(stepper, requests, [straight_line(loaded, prompt, NUM_NEW) for prompt in prompts])
    assert stepper.scheduler.num_preemptions > 0
    assert stepper.scheduler.num_saved_preemptions == (stepper.scheduler.num_preemptions if saves else 0)


def test_8_a_saved_request_goes_on_bit_for_bit(loaded: LoadedModel) -> None:
    """Keys, values and latent rows come back from host memory as they were."""
    a, undisturbed, b, preempted = preempted_run(loaded, saves=True)
    assert b.scheduler.num_saved_preemptions == 1
    assert torch.equal(a.logits_of(undisturbed), b.logits_of(preempted))


def test_3_started_from_the_prefix_cache_equals_alone(loaded: LoadedModel, alone: list[Run]) -> None:
    stepper = Stepper(loaded, max_snapshots=16)
    for _ in range(2):
        requests = run_all(stepper)
        assert_equal_runs(stepper, requests, alone)
    assert [request.num_cached_tokens for request in requests] == [(length - 1) // 64 * 64 for length in LENGTHS]
    has_state = loaded.config.linear_attention is not None
    assert (stepper.cache.num_snapshots > 0) == has_state  # without state the blocks alone are enough


def test_1_memory_of_any_content_gives_the_logits_of_zeroed_memory(loaded: LoadedModel) -> None:
    found = []
    for byte in (0, 0xFF, 0x7F):
        stepper = Stepper(loaded)
        poison(stepper.caches, byte)
        request = stepper.add(PROMPTS[2], PARAMS)
        stepper.run()
        found.append(stepper.logits_of(request))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("num_tokens", [63, 65, 130])
def test_2_chunks_of_rectangular_states_equal_the_recurrence(hybrid: LoadedModel, num_tokens: int) -> None:
    """K = 8 and V = 12, two value heads a key head, token by token on the reference."""
    linear = hybrid.config.linear_attention
    assert linear is not None
    assert (linear.key_head_dim, linear.value_head_dim) == (8, 12)
    assert linear.num_value_heads == 2 * linear.num_key_heads  # fault 23
    kind = model_class(hybrid.config.architecture)
    table = kind.parameter_table(hybrid.config)
    tensors = random_tensors(table, compute_dtype=torch.float32, device=PLACE.device, seed=3)
    ours = LoadedModel(hybrid.config, kind(hybrid.config, tensors, select(PLACE.backend), torch.float32))
    judge = LoadedModel(hybrid.config, kind(hybrid.config, tensors, select("reference"), torch.float32))
    stepper = Stepper(ours, max_num_batched_tokens=64)
    request = stepper.add(random_prompt(2, num_tokens), replace(PARAMS, max_tokens=4))
    stepper.run()
    assert_close([stepper.logits_of(request)], [token_by_token(judge, request.token_ids[:-1])[num_tokens - 1 :]])


def test_5_one_token_prompt_reads_nothing_of_the_slot_s_last_owner(loaded: LoadedModel) -> None:
    stepper = Stepper(loaded)
    for tensor in cache_tensors(stepper.caches):
        tensor.fill_(7.0)
    request = stepper.add([17], PARAMS)
    stepper.run()
    assert torch.equal(stepper.logits_of(request), straight_line(loaded, [17], NUM_NEW).logits)


@pytest.mark.parametrize("budget", [100, 2048])
def test_6_snapshots_are_of_exactly_their_tokens(hybrid: LoadedModel, budget: int) -> None:
    stepper = make_stepper(hybrid, max_num_batched_tokens=budget, interval=128, max_snapshots=16)
    prompts = [random_prompt(0, 300), [*random_prompt(0, 128), *random_prompt(1, 70)], random_prompt(2, 65)]
    requests = [stepper.add(prompt, replace(PARAMS, max_tokens=70)) for prompt in prompts]
    stepper.run()
    assert check_snapshots(stepper, requests, FreshStates(hybrid)) >= 4


def test_25_packed_prompts_do_not_leak_into_each_other(loaded: LoadedModel) -> None:
    pair = [random_prompt(40, 67), random_prompt(41, 3)]
    runs = [straight_line(loaded, prompt, 2) for prompt in pair]
    for order in ((0, 1), (1, 0)):
        stepper = Stepper(loaded)
        requests = [stepper.add(pair[i], replace(PARAMS, max_tokens=2)) for i in order]
        stepper.run()
        assert len(stepper.runner.outputs[0].scheduled) == 2
        assert_equal_runs(stepper, requests, [runs[i] for i in order])


def decode_batch(tokens: list[int], position: int, rows: list[int | None]) -> ForwardBatch:
    """One decode step; `rows[i]` is request i's slot and block, None for a padded row."""
    slots = [PAD_SLOT if row is None else row for row in rows]
    n = len(rows)

    def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=PLACE.device)

    return ForwardBatch(
        token_ids=integers(tokens, torch.int64),
        positions=integers([position] * n, torch.int64),
        query_start_loc=integers(list(range(n + 1))),
        prefill_start_loc=integers([0]),
        seq_lens=integers([0 if row is None else position + 1 for row in rows]),
        slot_mapping=integers([PAD_SLOT if row is None else row * 64 + position for row in rows], torch.int64),
        block_table=integers([max(slot, 0) for slot in slots])[:, None],
        state_slots=integers(slots),
        has_initial_state=integers([position > 0] * n, torch.bool),
        logits_indices=None,
        num_decodes=n,
        num_prefill_blocks=0,
        snapshots=None,
    )


def decode_steps(loaded: LoadedModel, caches: tuple[LayerCache, ...], rows: list[int | None]) -> torch.Tensor:
    """Three steps from nothing; logits [3, N, vocab]."""
    found = []
    for position in range(3):
        tokens = [100 * position + (0 if row is None else row) for row in rows]
        hidden = loaded.model.forward(decode_batch(tokens, position, rows), caches)
        found.append(loaded.model.logits(hidden))
    return torch.stack(found)


@torch.inference_mode()
def test_30_padded_rows_touch_nothing(loaded: LoadedModel) -> None:
    """Three live rows in a step of five; every slot and block that nobody owns keeps its bytes."""
    caches, plain = loaded.caches(6, 6), loaded.caches(6, 6)
    padded = decode_steps(loaded, caches, [4, None, 1, 2, None])
    assert_close([padded[:, [0, 2, 3]]], [decode_steps(loaded, plain, [4, 1, 2])])
    for tensor in cache_tensors(caches):
        untouched = tensor[[0, 3, 5]]
        assert bool((untouched.view(torch.uint8) == 0xFF).all())


def test_a_session_goes_on_bit_for_bit_after_its_file(folder: Path, tmp_path: Path) -> None:
    turns = [random_prompt(0, 100), random_prompt(1, 30)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=2)
    with Engine.load(str(folder), max_num_seqs=2, seed=0, **PLACE.options) as engine:
        cold = engine.complete_tokens(turns[0], params)
        whole = engine.complete_tokens([*turns[0], *cold.token_ids, *turns[1]], params)
        session = engine.session()
        assert session.complete(turns[0], params).token_ids == cold.token_ids
        session.save(tmp_path / "past")
        last = session.complete(turns[1], params)
        assert last.token_ids == whole.token_ids
        assert last.usage.num_cached_tokens == 105
    with Engine.load(str(folder), max_num_seqs=2, seed=0, **PLACE.options) as engine:
        restored = engine.restore(tmp_path / "past").complete(turns[1], params)
        assert restored.usage.num_cached_tokens == 105
    assert restored.logprobs == last.logprobs


def test_a_layer_trace_finds_nothing_but_what_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ops write in place, in paged caches too, is compared and led along; a rotation that is off is named."""
    with Engine.load(str(folder), max_num_seqs=1, **PLACE.options) as engine:
        found = trace(engine, random_prompt(4, 66), 2)
        assert found.findings == ()
        assert found.num_tensors > 100
        monkeypatch.setattr(engine._core.runner.model, "ops", _TurnedBack(engine._core.runner.model.ops))
        wrong = trace(engine, random_prompt(4, 66), 2).finding
    assert wrong is not None
    assert (wrong.op, wrong.where) == ("rotary", "output")


class _TurnedBack:
    """Ops whose rotation is one position behind."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def rotary(self, heads: Tensor, positions: Tensor, *rest: object) -> None:
        self._ops.rotary(heads, positions - 1, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_model_len", [None, 128])
def test_15_the_capacity_printed_is_what_one_request_can_use(folder: Path, max_model_len: int | None) -> None:
    """Also of a model with keys and values and no latent rows, and of one with latent rows and no state."""
    options = {"max_num_seqs": 2, "memory": 500_000, "max_model_len": max_model_len}
    with Engine.load(str(folder), max_snapshots=2, **{**PLACE.options, **options}) as engine:
        description = engine.describe()
        report, limit = description["memory"], engine.max_model_len
        assert report["allocated_bytes"] == report["planned_bytes"] <= 500_000
        assert limit == (min(report["num_cache_tokens"], 4096) if max_model_len is None else max_model_len)
        is_hybrid = description["model"]["architecture"] in HYBRIDS
        assert (report["bytes_per_slot"] > 0) == is_hybrid
        assert report["bytes_per_block"] == (2 * 2 * 16 if is_hybrid else 4 * (24 + 8)) * 64 * 4
        assert (report["num_snapshot_slots"] > 0) == is_hybrid
        prompt = random_prompt(0, limit - 2)
        usage = engine.complete_tokens(prompt, replace(PARAMS, max_tokens=2)).usage
        assert usage.num_prompt_tokens + usage.num_output_tokens == limit
        with pytest.raises(ValueError, match=rf"\b{limit + 1}\b.*\b{limit}\b"):
            engine.complete_tokens([*prompt, 1], replace(PARAMS, max_tokens=2))


def test_an_image_is_refused_by_name(tmp_path: Path) -> None:
    """As a part of a message, and as the token that stands for one."""
    write_wrapped("Qwen3_5ForConditionalGeneration", tmp_path)
    with Engine.load(str(tmp_path), max_num_seqs=1, **PLACE.options) as engine:
        with pytest.raises(UnsupportedOptionError, match=r"token id 7 stands for an image"):
            engine.complete_tokens([5, 7, 6], PARAMS)
        with pytest.raises(UnsupportedOptionError, match=r"token id 8 stands for a video"):
            engine.complete_tokens([8], PARAMS)
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        with pytest.raises(UnsupportedOptionError, match="image_url"):
            engine.chat([{"role": "user", "content": [image]}], PARAMS)
        assert engine.complete_tokens([5, 6], PARAMS).usage.num_output_tokens == NUM_NEW
