"""Faults put into a loaded engine, one at a time: the comparison says mismatch, and the trace names layer and op.

Ops are replaced in the portable backend's modules, layers and weights in the loaded model, steps in the runner's
module: the reference backend and the checkpoint stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.goldens_of import tiny_golden
from torch import Tensor

import deltafold.runner.runner as runner_module
from deltafold import Engine
from deltafold.cache.memory import LayerCache
from deltafold.layers.batch import ForwardBatch
from deltafold.ops import Ops, portable
from deltafold.ops.portable import fused
from deltafold.parity.arguments import trace_of
from deltafold.parity.compare import compare
from deltafold.parity.golden import Golden
from deltafold.parity.verdict import Verdict

Op = Callable[..., Any]
Patch = pytest.MonkeyPatch

EXPERT_LAYER, STATE_LAYER, LAST_LAYER = 1, 1, 3
ATTENTION_LAYER = 2


@pytest.fixture(scope="module")
def golden(engine: Engine) -> Golden:
    return tiny_golden(engine)


@pytest.fixture
def faulty(tiny_folder: Path) -> Iterator[Engine]:
    """An engine of its own for each fault."""
    with Engine.load(str(tiny_folder), device="cpu", max_num_seqs=4) as loaded:
        yield loaded


def replace_op(patch: Patch, name: str, make: Callable[[Op], Op]) -> None:
    """Puts another op in place of the portable one, for models that call it and for ops composed of it."""
    original = getattr(portable, name)
    wrong = make(original)
    for module in (portable, fused):
        if getattr(module, name, None) is original:
            patch.setattr(module, name, wrong)


def gate_sign(patch: Patch, engine: Engine) -> None:
    replace_op(patch, "decay_gate", lambda op: lambda *args: -op(*args))


def output_gate_sign(patch: Patch, engine: Engine) -> None:
    replace_op(patch, "gated_rms_norm", lambda op: lambda x, gate, *rest: op(x, -gate, *rest))


def expert_scale(patch: Patch, engine: Engine) -> None:
    """Of one expert's weights, 1 %."""
    model: Any = engine._core.runner.model
    model.decoder.layers[EXPERT_LAYER].feed_forward.w2[3] *= 1.01


def conv_tap_order(patch: Patch, engine: Engine) -> None:
    replace_op(patch, "causal_conv", lambda op: lambda x, weight, *rest: op(x, weight.flip(-1), *rest))


def k_pe_dropped(patch: Patch, engine: Engine) -> None:
    def without_k_pe(op: Op, rank_of: Callable[..., int]) -> Op:
        def wrong(q: Tensor, *rest: Any) -> Any:
            cache = next(item for item in rest if isinstance(item, Tensor) and item.dim() == 3 and item.shape[1] == 64)
            q = q.clone()
            q[..., q.shape[-1] - (cache.shape[2] - rank_of(*rest)) :] = 0
            return op(q, *rest)

        return wrong

    for name in ("mla_prefill", "mla_step"):
        replace_op(patch, name, lambda op: without_k_pe(op, lambda kv_b, *rest: int(kv_b.shape[2])))
    replace_op(patch, "mla_decode", lambda op: without_k_pe(op, lambda cache, lens, table, rank, scale: int(rank)))


def beta_missing(patch: Patch, engine: Engine) -> None:
    for name in ("chunked_delta_rule", "recurrent_delta_rule"):
        replace_op(patch, name, lambda op: lambda q, k, v, g, beta, *rest: op(q, k, v, g, torch.ones_like(beta), *rest))


@dataclass(frozen=True)
class Forgetful:
    """A mixer whose state is gone at every decode step."""

    mixer: Any

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        if batch.num_decodes and cache.recurrent_state is not None:
            cache.recurrent_state.zero_()
        result: Tensor = self.mixer.forward(x, batch, cache, ops)
        return result


def state_zeroed(patch: Patch, engine: Engine) -> None:
    layers = engine._core.runner.model.decoder.layers  # type: ignore[attr-defined]  # of the concrete class
    layers[STATE_LAYER] = dataclasses.replace(layers[STATE_LAYER], mixer=Forgetful(layers[STATE_LAYER].mixer))


def logits_row_shifted(patch: Patch, engine: Engine) -> None:
    build = runner_module.build_batch

    def shifted(*args: Any) -> ForwardBatch:
        batch = build(*args)
        return dataclasses.replace(batch, logits_indices=(batch.logits_indices - 1).clamp(min=0))

    patch.setattr(runner_module, "build_batch", shifted)


def ids_zeroed(patch: Patch, engine: Engine) -> None:
    sample = runner_module.sample
    patch.setattr(runner_module, "sample", lambda *args: torch.zeros_like(sample(*args)))


@dataclass(frozen=True)
class Fault:
    """What to break, and where the trace must find it: an op called with it, or one composed of it."""

    put: Callable[[Patch, Engine], None]
    layer: int | None
    ops: tuple[str, ...]
    where: str


FAULTS = (
    Fault(gate_sign, 0, ("decay_gate", "delta_prefill"), "output"),
    Fault(output_gate_sign, 0, ("gated_rms_norm",), "output"),
    Fault(expert_scale, EXPERT_LAYER, ("grouped_experts", "routed_experts"), "weight"),
    Fault(conv_tap_order, 0, ("causal_conv",), "output"),
    Fault(k_pe_dropped, ATTENTION_LAYER, ("mla_prefill",), "output"),
    Fault(beta_missing, 0, ("chunked_delta_rule", "delta_prefill"), "output"),
    Fault(state_zeroed, STATE_LAYER, ("recurrent_delta_rule", "delta_step", "low_rank_delta_step"), "input"),
    Fault(logits_row_shifted, LAST_LAYER, ("add_rms_norm",), "input"),
    Fault(ids_zeroed, None, ("sample",), "output"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.put.__name__)
def test_fault_is_a_mismatch_and_the_trace_names_it(
    fault: Fault, golden: Golden, faulty: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.put(monkeypatch, faulty)
    comparison = compare(golden, faulty)
    assert comparison.verdict is Verdict.MISMATCH
    finding = trace_of(golden, comparison, faulty).finding
    assert finding is not None
    assert (finding.layer, finding.where) == (fault.layer, fault.where), str(finding)
    assert finding.op in fault.ops
    assert finding.error > 3 * finding.tolerance


def test_engine_without_a_fault_is_identical_and_its_trace_finds_nothing(golden: Golden, faulty: Engine) -> None:
    comparison = compare(golden, faulty)
    assert comparison.verdict is Verdict.IDENTICAL
    found = trace_of(golden, comparison, faulty)
    assert found.finding is None
    assert found.num_decodes == 8
    assert found.num_tensors > 500
    assert all(0 < error.prefill < 3e-6 and 0 < error.decode < 3e-6 for error in found.layers)
