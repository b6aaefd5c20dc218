"""The precision study: what its variants change, what its figures count, and that a row that fails says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import precision_study, precision_tables
from benchmarks.precision_slice import drawn, random_weights, write_slice
from benchmarks.precision_study import BUILTIN, Task, bits_per_byte, join, study, work
from benchmarks.precision_variants import ExpandedMla, StudyOps, Uses, Variant, changed, loaded
from tools.builtin_model.evaluate import TokenSet, score_engine

from deltafold import Engine, SamplingParams, WeightsError
from deltafold.checkpoint.config import load_config
from deltafold.checkpoint.fingerprint import fingerprint
from deltafold.checkpoint.weights import Init, Source, TensorSpec
from deltafold.models import model_class
from deltafold.ops import PAD_SLOT, Backend, select
from deltafold.parity.record import EngineSource
from deltafold.parity.trace import _straight_batch

PROMPT = list(range(200, 270))
"""More than one chunk."""


def slots_and_inputs(num_tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A state pool [3, HV, K, V] and the other arguments of a delta rule over one request, in slot 2."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = normal(3, 2, 8, 8).bfloat16().float()
    q, k, v = (normal(num_tokens, 2, 8) for _ in range(3))
    raw_gate, beta = normal(num_tokens, 2, 8), normal(num_tokens, 2)
    return state, [q, k, v, raw_gate, beta, normal(2), normal(2, 8)]


def requests(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A padded request without tokens, then one in slot 2 that has a state."""
    return (
        torch.tensor([0, 0, num_tokens], dtype=torch.int32),
        torch.tensor([PAD_SLOT, 2], dtype=torch.int32),
        torch.tensor([True, True]),
    )


def test_bfloat16_state_is_rounded_and_the_output_is_not() -> None:
    state, inputs = slots_and_inputs(5)
    expected = state.clone()
    ops = select(Backend.PORTABLE)
    output = ops.delta_prefill(*inputs, expected, *requests(5))
    uses = Uses()
    study_ops = StudyOps(ops, Variant(has_bfloat16_state=True), uses)
    assert torch.allclose(study_ops.delta_prefill(*inputs, state, *requests(5)), output, atol=1e-6)
    assert torch.equal(state, expected.bfloat16().float())
    assert not torch.equal(state, expected)
    assert (uses.prefills, uses.decodes) == (1, 0)


def test_recurrent_prefill_takes_the_recurrence() -> None:
    state, inputs = slots_and_inputs(5)
    ops = SimpleNamespace(**{name: getattr(select(Backend.PORTABLE), name) for name in ("decay_gate",)})
    calls: list[str] = []
    for name in ("chunked_delta_rule", "recurrent_delta_rule"):
        setattr(ops, name, lambda *args, name=name: calls.append(name))
    StudyOps(ops, Variant(has_recurrent_prefill=True), Uses()).delta_prefill(*inputs, state, *requests(5))  # type: ignore[arg-type]
    StudyOps(ops, Variant(), Uses()).delta_prefill(*inputs, state, *requests(5))  # type: ignore[arg-type]
    assert calls == ["recurrent_delta_rule", "chunked_delta_rule"]


@pytest.mark.parametrize(
    "variant",
    [
        Variant(has_bfloat16_state=True),
        Variant(has_recurrent_prefill=True),
        Variant(has_expanded_decode=True),
    ],
)
def test_a_change_that_is_not_used_is_no_row(variant: Variant) -> None:
    with pytest.raises(RuntimeError, match="went past"), loaded("builtin", variant, "cpu", "portable"):
        pass
    with pytest.raises(RuntimeError, match="went past"):  # a state is rounded in both phases, or it is another study
        Uses(prefills=3 if variant.has_expanded_decode else 0, decodes=0).check(variant)


def test_changed_models_compute_what_the_unchanged_one_does_in_float32() -> None:
    steps = []
    for variant in (Variant(), Variant(has_recurrent_prefill=True, has_expanded_decode=True)):
        with loaded("builtin", variant, "cpu", "portable") as engine:
            inner: Any = engine._core.runner.model
            mixers = [layer.mixer for layer in inner.decoder.layers]
            assert sum(isinstance(mixer, ExpandedMla) for mixer in mixers) == 2 * variant.has_expanded_decode
            [found] = EngineSource(engine).complete([PROMPT], max_tokens=4, ignore_eos=True)
            steps.append(found)
    assert [step.token_id for step in steps[0]] == [step.token_id for step in steps[1]]
    drift = [abs(a.logprob - b.logprob) for a, b in zip(*steps, strict=True)]
    assert 0 < max(drift) < 1e-4  # another order of sums, and no more


def test_expanded_decode_hands_decodes_on_as_prefills() -> None:
    batch = _straight_batch(list(range(130)), 129)  # one decode, in its third block
    taken: list[Any] = []
    mixer: Any = SimpleNamespace(forward=lambda x, batch, cache, ops: taken.append(batch) or x)
    uses = Uses()
    ExpandedMla(mixer, uses).forward(torch.zeros(1, 4), batch, None, None)  # type: ignore[arg-type]
    assert (batch.num_decodes, taken[0].num_decodes, uses.decodes) == (1, 0, 1)
    assert taken[0].prefill_start_loc.tolist() == [0, 1]
    assert taken[0].num_prefill_blocks == 3


def test_changed_keeps_the_class_it_changes() -> None:
    kind = model_class("KimiLinearForCausalLM")
    assert issubclass(changed(kind, Variant(), Uses()), kind)


def test_slice_has_the_released_shape(tmp_path: Path) -> None:
    write_slice(tmp_path, BUILTIN, 256, "cuda")
    config = load_config(tmp_path)
    table = model_class(config.architecture).parameter_table(config)
    assert table["model.layers.1.moe.w13"].shape == (257, 2048, 2304)
    assert table["model.layers.3.self_attn.kv_b"].shape == (32, 256, 512)
    assert table["model.layers.0.self_attn.dt_bias"].shape == (32, 128)
    assert config.moe is not None
    assert config.moe.num_experts_per_token == 8
    other = tmp_path / "other"
    other.mkdir()
    write_slice(other, BUILTIN, 256, "cpu")
    assert fingerprint(other) != fingerprint(tmp_path)  # drawn elsewhere, other weights


def test_drawn_weights_are_bfloat16_values_in_any_dtype() -> None:
    table = {
        "w": TensorSpec((64, 8), (Source(("w",), (64, 8)),)),
        "A_log": TensorSpec((64,), (Source(("A_log",), (64,)),), torch.float32, init=Init.A_LOG),
    }
    cpu = torch.device("cpu")
    narrow, wide = (drawn(Path(), table, compute_dtype=dtype, device=cpu) for dtype in (torch.bfloat16, torch.float32))
    assert (narrow["w"].dtype, wide["w"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(narrow["w"].float(), wide["w"])
    assert torch.equal(narrow["A_log"], wide["A_log"])
    assert not torch.equal(wide["A_log"].bfloat16().float(), wide["A_log"])


def test_an_engine_takes_drawn_weights_only_while_asked_to(tmp_path: Path) -> None:
    write_slice(tmp_path, BUILTIN, 8, "cpu")
    (tmp_path / "config.json").write_text((BUILTIN / "config.json").read_text())
    with random_weights(), Engine.load(tmp_path, device="cpu", memory=2**28, show_progress=False) as engine:
        assert len(engine.complete_tokens(PROMPT, SamplingParams(max_tokens=2)).token_ids) == 2
    with pytest.raises(WeightsError, match="missing"):
        Engine.load(tmp_path, device="cpu", show_progress=False)


class CountingEngine:
    """Every token but a prompt's first has logprob -1."""

    def __init__(self, text_ids: list[int]) -> None:
        self.text_ids = text_ids
        self.prompts: list[list[int]] = []

    def encode(self, text: str) -> list[int]:
        return self.text_ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"xy"

    def complete_tokens(self, prompts: list[list[int]], params: Any) -> list[Any]:
        self.prompts += prompts
        entry = SimpleNamespace(logprob=-1.0)
        return [SimpleNamespace(prompt_logprobs=(None, *[entry] * (len(ids) - 1))) for ids in prompts]


@pytest.mark.parametrize("count", [2, 5, 8, 9, 12, 13, 31])
def test_bits_per_byte_counts_every_token_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_study, "WINDOW", 8)
    engine: Any = CountingEngine(list(range(count)))
    assert bits_per_byte(engine, "é" * 50) == pytest.approx((count - 1) / math.log(2) / 98)
    assert max(map(len, engine.prompts)) <= 8


@pytest.mark.parametrize("window", [4, 8, 64])
def test_engine_score_counts_every_token_once(window: int) -> None:
    lengths = [0, 1, 6, 7, 8, 9, 30]
    sources = np.array(["a", "b", "a", "a", "b", "b", "a"])
    tokens = TokenSet(
        np.arange(sum(lengths), dtype=np.uint16), np.array(lengths, np.int32), np.full(7, 10, np.int32), sources
    )
    engine: Any = CountingEngine([])
    score = score_engine(engine, tokens, 99, window=window)
    assert score.bits == pytest.approx((sum(lengths) + 7) / math.log(2))  # with the [EOS] that ends each
    assert score.num_bytes == 70
    assert score.by_source["b"] == pytest.approx((1 + 8 + 9 + 3) / math.log(2) / 30)
    assert max(map(len, engine.prompts)) <= window + 1
    assert [ids[0] for ids in engine.prompts].count(99) >= 7


def row(**fields: Any) -> dict[str, Any]:
    return {"name": "float32", "model": "builtin", "device": "cpu", "backend": "portable", **fields}


def test_joined_rows_keep_parts_and_lose_errors() -> None:
    old = [row(error="died", bits_per_byte=1.0), row(name="bfloat16", seconds=1)]
    joined = join(old, [row(decode_tokens_per_second=5.0)])
    assert joined == [row(name="bfloat16", seconds=1), row(bits_per_byte=1.0, decode_tokens_per_second=5.0)]
    assert len(join(old, [row(device="cuda")])) == 3


def test_a_row_that_fails_says_so_and_the_next_is_measured(tmp_path: Path) -> None:
    tasks = [
        Task("float32", "cpu", "portable", sizes=("1x2",), parts=("compare",)),
        Task("float32, state bfloat16", "cpu", "portable", sizes=("1x2",), parts=("compare",)),
    ]
    tasks[0].record_goldens(tmp_path)
    stolen = Task("bfloat16", "cpu", "portable", sizes=("3x2",), parts=("compare",))
    work([stolen, *tasks], tmp_path, tmp_path / "rows.json")
    failed, exact, rounded = json.loads((tmp_path / "rows.json").read_text())
    assert "golden-builtin-3x2.json: cannot be read" in failed["error"]
    assert "error" not in exact
    assert (exact["1x2"]["num_matched"], exact["1x2"]["num_tokens"], exact["1x2"]["num_positions"]) == (2, 2, 4)
    assert exact["1x2"]["num_mismatches"] == 0
    assert exact["1x2"]["decode_kl"] < 1e-9 < rounded["1x2"]["decode_kl"]
    assert rounded["1x2"]["num_mismatches"] == 0  # judged as bfloat16, which it is in part


def test_a_worker_that_does_not_end_leaves_a_row_with_the_reason(tmp_path: Path) -> None:
    arguments: Any = SimpleNamespace(
        data=[tmp_path / "rows.json"], goldens=tmp_path, parts=("compare",), jobs=1, limit=0.0
    )
    assert not study(arguments, [Task("float32", "cpu", "portable", sizes=("1x2",))])
    [found] = json.loads((tmp_path / "rows.json").read_text())
    assert found == row(error="not done after 0 s")


def figures(**fields: Any) -> dict[str, Any]:
    names = ("num_identical", "num_near_ties", "num_mismatches", "num_parted", "num_positions", "largest_gap")
    names += ("largest_drift", "drift_99", "mean_kl", "decode_kl", "num_matched", "num_tokens")
    return {**dict.fromkeys(names, 0), **fields}


def test_tables_show_the_largest_run_failures_and_what_is_missing(tmp_path: Path) -> None:
    rows = [
        row(**{"8x16": figures(num_matched=100, num_tokens=128), "64x128": figures(num_tokens=8192, num_near_ties=61)}),
        row(name="bfloat16", error="died"),
        row(name="bfloat16, eager", error="not done after 3 s"),
        row(model="slice256", device="cuda", decode_tokens_per_second=5000.0, prefill_tokens_per_second=1.0),
    ]
    text = precision_tables.render(rows, tmp_path / "plot")
    first = next(line for line in text.splitlines() if line.startswith("| float32 |"))
    assert first.startswith("| float32 | 100 of 128 | 0 of 8192 | 0 / 61 / 0 |")
    assert "| bfloat16 (**failed**) | - | - |" in text
    assert "| bfloat16, eager (not finished) |" in text
    assert "1, 5,000 |" in text
    assert (tmp_path / "plot-builtin.svg").read_text().startswith("<svg")
