"""At start: fixed cases of the delta rule's kernels against the portable ops, at the model's own shapes.

Compilers have shipped wrong code for single GPU types. A kernel that disagrees is refused by name, and the portable op
takes its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from deltafold.cache.memory import LayerSpec
from deltafold.errors import DeltafoldWarning
from deltafold.ops import Activation, Backend, Ops, select

NUM_TOKENS = 130
"""Two whole chunks and a part of one."""

RANK = 24
"""Of the gates of a step whose gates are of low rank."""

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Root mean square of the error over that of the right result: several times what correct kernels are off by."""


def checked_ops(
    ops: Ops, specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> tuple[Ops, list[str]]:
    """`ops`, with the portable op in place of each that fails its case, and the names of those."""
    portable = select(Backend.PORTABLE)
    failed: set[str] = set()
    for name, recurrent_shape, case in check_cases(specs, dtype, device):
        error = _error(case(ops), case(portable))
        if not error <= TOLERANCES[dtype]:
            failed.add(name)
            message = f"kernel {name} is off by {error:.2g} at shape {recurrent_shape}: the portable op runs instead"
            warnings.warn(message, DeltafoldWarning, stacklevel=2)
    if not failed:
        return ops, []
    names = [name for name in dir(Ops) if not name.startswith("_")]
    replaced = {name: getattr(portable if name in failed else ops, name) for name in names}
    return cast(Ops, SimpleNamespace(**replaced)), sorted(failed)


Case = Callable[[Ops], Sequence[Tensor]]


def check_cases(
    specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, tuple[int, ...], Case]]:
    """Op, state shape [HV, K, V] and case, for each shape among the layers."""
    shapes = {(spec.recurrent_shape, spec.conv_shape, spec.decays_by_head) for spec in specs if spec.recurrent_shape}
    for recurrent_shape, conv_shape, decays_by_head in sorted(shapes):
        cases = _Cases(recurrent_shape, conv_shape, decays_by_head, dtype, device)
        yield "delta_prefill", recurrent_shape, cases.prefill
        if decays_by_head:
            yield "delta_step", recurrent_shape, cases.step
        else:  # with a decay a row, gates are of low rank
            yield "low_rank_delta_step", recurrent_shape, cases.low_rank_step


class _Cases:
    """Inputs drawn on the CPU from a fixed seed, with gates as trained models have them."""

    def __init__(
        self,
        recurrent_shape: tuple[int, ...],
        conv_shape: tuple[int, ...],
        decays_by_head: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        HV, K, V = recurrent_shape
        channels, taps = conv_shape
        self._heads = (channels - HV * V) // (2 * K)
        self._shape, self._dtype, self._device = (HV, K, V), dtype, device
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        self._qkv = normal(NUM_TOKENS, channels)
        decay_shape = (HV,) if decays_by_head else (HV, K)
        self._activation: Activation = "silu" if decays_by_head else "sigmoid"
        self._gate = normal(NUM_TOKENS, *decay_shape) * 0.5
        self._beta, self._out_gate = normal(NUM_TOKENS, HV), normal(NUM_TOKENS, HV, V)
        self._conv = normal(channels, taps + 1) * 0.3
        self._norm = torch.ones(V, dtype=dtype, device=device)
        self._A_log = torch.rand(HV, generator=draw).mul_(15).add_(1).log_().to(device)
        self._dt_bias = torch.rand(decay_shape, generator=draw).mul_(2.3).sub_(4.6).to(device)
        self._slots = torch.tensor([1], dtype=torch.int32, device=device)

    def prefill(self, ops: Ops) -> Sequence[Tensor]:
        """Output and state of a prompt."""
        HV, K, V = self._shape
        q, k, v = self._qkv.split([self._heads * K, self._heads * K, HV * V], dim=-1)
        state = self._states()
        out = ops.delta_prefill(
            q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, V)),
            self._gate, self._beta, self._A_log, self._dt_bias, state,
            torch.tensor([0, NUM_TOKENS], dtype=torch.int32, device=self._device), self._slots, self._has_state(False),
        )  # fmt: skip
        return out, state[1]

    def step(self, ops: Ops) -> Sequence[Tensor]:
        """Outputs, state and taps of a few decode steps."""
        return self._steps(
            lambda t, state, taps: ops.delta_step(
                self._qkv[t], self._conv, taps, self._gate[t], self._beta[t], self._A_log, self._dt_bias,
                self._out_gate[t], self._norm, 1e-5, self._activation, state, self._slots, self._has_state(True),
            )
        )  # fmt: skip

    def low_rank_step(self, ops: Ops) -> Sequence[Tensor]:
        """The same with gates of low rank, whose upper halves are the gates drawn above."""
        gate_up, out_up = (x[:RANK].view(-1, RANK) * RANK**-0.5 for x in (self._gate, self._out_gate))
        return self._steps(
            lambda t, state, taps: ops.low_rank_delta_step(
                self._qkv[t], self._conv, taps, self._qkv[t][:, :RANK], gate_up, self._beta[t], self._A_log,
                self._dt_bias, self._qkv[t][:, -RANK:], out_up, self._norm, 1e-5, self._activation, state, self._slots,
                self._has_state(True),
            )
        )  # fmt: skip

    def _steps(self, step: Callable[[slice, Tensor, Tensor], Tensor]) -> Sequence[Tensor]:
        """Of one token after another, each given as its row: outputs, state and taps."""
        state = self._states()
        taps = self._qkv[:4, :, None].expand(4, -1, self._conv.shape[1] - 1).contiguous()
        outputs = [step(slice(t, t + 1), state, taps) for t in range(4)]
        return torch.cat(outputs), state[1], taps[1]

    def _states(self) -> Tensor:
        return torch.full((4, *self._shape), 0.01, dtype=torch.float32, device=self._device)

    def _has_state(self, value: bool) -> Tensor:
        return torch.tensor([value], device=self._device)


@torch.inference_mode()
def _error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest over the tensors; NaN if any value is."""
    errors = [
        float((a.double() - b.double()).square().mean().sqrt() / b.double().square().mean().sqrt())
        for a, b in zip(found, right, strict=True)
    ]
    return max(errors, key=lambda error: (error != error, error))
