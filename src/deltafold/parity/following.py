"""The reference model led along a recording: each op gets the recorded inputs and passes the recorded outputs on.

So errors do not add up: what an op's output is off by was done in that op, and what an input is off by was done since
the op before (projections, row selection, the runner's inputs). Routing cannot flip on a rounding either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafold.parity.recording import (
    POOLS,
    WRITTEN,
    Call,
    inputs_of,
    kept,
    outputs_of,
    pool,
    pool_rows,
    weights_of,
    written_of,
)

ACTIVATIONS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error of an activation, relative to its root mean square, by the engine's dtype; see `docs/numerics.md`."""

WEIGHTS = 1e-6
"""The same for a weight, beside the checkpoint's own value rounded to the engine's dtype."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A tensor out of tolerance. `layer` is None outside the layers; `where` is "weight", "input" (then the fault is in
    what leads to the op), "output", or "call" for an op that the reference does not call there. `error` is relative to
    the reference's root mean square."""

    step: int  # 0 is the prefill, n the n-th decode
    layer: int | None
    op: str
    where: str
    name: str
    error: float
    tolerance: float

    def __str__(self) -> str:
        step = "prefill" if self.step == 0 else f"decode step {self.step}"
        layer = "outside the layers" if self.layer is None else f"layer {self.layer}"
        return (
            f"{layer}, op {self.op}, {self.where} {self.name!r} in {step}: relative error {self.error:.2e}, "
            f"tolerance {self.tolerance:.0e}"
        )


@dataclass(frozen=True, slots=True)
class LayerError:
    """The largest error of an op's output within a layer, by kind of step (0 where there was none)."""

    layer: int
    prefill: float
    decode: float


class OffTrackError(Exception):
    """The two models do not make the same calls: nothing after that can be compared."""


class Follower:
    """An observer of the reference model; `calls` are the engine's."""

    def __init__(self, calls: Sequence[Call], dtype: torch.dtype, num_layers: int) -> None:
        self.layer: int | None = None
        self.findings: list[Finding] = []
        self.num_tensors = 0
        self.tolerance = ACTIVATIONS[dtype]
        self._calls = iter(calls)
        self._step = 0
        self._errors = [[0.0, 0.0] for _ in range(num_layers)]

    def op(self, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """See `Observer.op`. Raises OffTrackError."""
        call = self._next(name)
        if call.step == 0:
            self._check_weights(call, weights_of(arguments))
        self._check_all(call, "input", call.inputs, dict(inputs_of(arguments)))
        _replace(arguments, call.inputs, is_written=False)
        result = function(*arguments.values())
        own = {str(i): part for i, part in enumerate(outputs_of(result)) if part.is_floating_point()}
        recorded = {str(i): part for i, part in enumerate(call.outputs) if part.is_floating_point()}
        self._check_all(call, "output", recorded, own)
        self._check_all(call, "output", call.written, dict(written_of(arguments)))
        _replace(arguments, call.written, is_written=True)
        return call.outputs if isinstance(result, tuple) else None if result is None else call.outputs[0]

    def after_forward(self, hidden: Tensor) -> None:
        """See `Observer.after_forward`. Raises OffTrackError."""
        call = self._next("model")
        self._check(call, "output", "hidden", call.outputs[0], hidden, self.tolerance)
        self._step += 1

    def after_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """See `Observer.after_logits`. Raises OffTrackError."""
        self._step -= 1
        call = self._next("logits")
        self._step += 1
        self._check(call, "input", "hidden", call.inputs["hidden"], hidden, self.tolerance)
        self._check(call, "output", "logits", call.outputs[0], logits, self.tolerance)

    def check_choice(self, step: int, token_id: int, logits: Tensor) -> None:
        """A drawn token must be the best of the reference's logits [vocab], or as good within tolerance."""
        self.num_tensors += 1
        gap = float(logits.max() - logits[token_id]) / _size(logits)
        if gap > 2 * self.tolerance:
            self.findings.append(Finding(step, None, "sample", "output", "token_id", gap, 2 * self.tolerance))

    def layer_errors(self) -> tuple[LayerError, ...]:
        """What was seen so far."""
        return tuple(LayerError(i, prefill, decode) for i, (prefill, decode) in enumerate(self._errors))

    def _next(self, op: str) -> Call:
        call = next(self._calls, None)
        if call is None or (call.step, call.layer, call.op) != (self._step, self.layer, op):
            found = call or Call(self._step, self.layer, "nothing")
            name = f"where the reference calls {op} in layer {self.layer}"
            self.findings.append(Finding(found.step, found.layer, found.op, "call", name, math.inf, 0.0))
            raise OffTrackError
        return call

    def _check_weights(self, call: Call, own: dict[str, Tensor]) -> None:
        for name, weight in call.weights.items():
            expected = own[name].to(weight.dtype).float()
            self._check(call, "weight", name, weight.to("cpu", torch.float32), expected, WEIGHTS)

    def _check_all(self, call: Call, where: str, recorded: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        for name in dict.fromkeys([*recorded, *own]):
            self._check(call, where, name, recorded.get(name), own.get(name), self.tolerance)

    def _check(
        self, call: Call, where: str, name: str, recorded: Tensor | None, own: Tensor | None, tolerance: float
    ) -> None:
        self.num_tensors += 1
        error = math.inf if recorded is None or own is None else relative_error(recorded, own)
        if where == "output" and call.layer is not None:
            errors = self._errors[call.layer]
            errors[call.step > 0] = max(errors[call.step > 0], error)
        if error > tolerance:
            self.findings.append(Finding(call.step, call.layer, call.op, where, name, error, tolerance))
        if recorded is not None and own is not None and recorded.shape != own.shape:
            raise OffTrackError


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over the reference's; infinite if shapes differ or ours is not finite."""
    if ours.shape != reference.shape or not bool(torch.isfinite(ours).all()):
        return math.inf
    return _size(ours - reference) / max(_size(reference), torch.finfo(torch.float32).tiny)


def _replace(arguments: dict[str, Any], values: dict[str, Tensor], *, is_written: bool) -> None:
    """Puts recorded values in the place of the reference's own; what ops write, in the tensors themselves."""
    for name, value in values.items():
        if name in POOLS:
            pool(name, arguments[name])[pool_rows(name, arguments, is_written=is_written)] = value
        elif name in WRITTEN:
            arguments[name].copy_(value)
        else:
            arguments[name] = kept(value)


def _size(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
