"""What a model computes, op by op: copies of every op's inputs and outputs over several steps.

Of the pools a copy holds the rows that a call reads or writes, so that two runs compare whatever slots they use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WEIGHTS = frozenset(
    {"weight", "conv_weight", "norm_weight", "A_log", "dt_bias", "kv_b", "bias", "w13", "w2", "inverse_frequencies"}
)
"""Arguments of ops that come from the checkpoint or its configuration."""

PAGED = ("latent_cache", "key_cache", "value_cache")
"""Pools by token, in blocks."""

POOLS = ("conv_state", "recurrent_state", *PAGED)
"""Arguments of which a call reads and writes some rows in place."""

WRITTEN = ("residual", "heads", *POOLS)
"""Arguments that ops write in place."""


@dataclass(slots=True)
class Call:
    """One call. `layer` is None outside the layers. Tensors are copies on the CPU, floating-point ones in float32;
    weights are the model's own. `written` are the arguments of WRITTEN after the call."""

    step: int
    layer: int | None
    op: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: tuple[Tensor, ...] = ()
    written: dict[str, Tensor] = field(default_factory=dict)


class Recorder:
    """An observer that keeps the calls; forward passes and output projections count as the ops "model" and "logits"."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.layer: int | None = None
        self._step = 0

    def op(self, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """See `Observer.op`."""
        call = Call(self._step, self.layer, name, weights_of(arguments), dict(inputs_of(arguments)))
        result = function(*arguments.values())
        call.outputs = tuple(kept(part) for part in outputs_of(result))
        call.written = dict(written_of(arguments))
        self.calls.append(call)
        return result

    def after_forward(self, hidden: Tensor) -> None:
        """See `Observer.after_forward`."""
        self.calls.append(Call(self._step, None, "model", outputs=(kept(hidden),)))
        self._step += 1

    def after_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """See `Observer.after_logits`."""
        call = Call(self._step - 1, None, "logits", inputs={"hidden": kept(hidden)}, outputs=(kept(logits),))
        self.calls.append(call)


def weights_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments that come from the checkpoint."""
    return {name: value for name, value in arguments.items() if name in WEIGHTS and isinstance(value, Tensor)}


def inputs_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Copies of the floating-point arguments that are not weights; of a pool the rows that are read."""
    for name, value in arguments.items():
        if name in WEIGHTS or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        found = value if name not in POOLS else pool(name, value)[pool_rows(name, arguments, is_written=False)]
        if found.numel():
            yield name, kept(found)


def written_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Copies of what a call wrote in place."""
    for name in WRITTEN:
        if name in arguments:
            value = arguments[name]
            if name in POOLS:
                value = pool(name, value)[pool_rows(name, arguments, is_written=True)]
            if value.numel():
                yield name, kept(value)


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """An op's result as a tuple; empty for an op that only writes in place."""
    if result is None:
        return ()
    return tuple(result) if isinstance(result, tuple) else (result,)


def pool(name: str, value: Tensor) -> Tensor:
    """A pool as rows: by state slot, or by token of a paged cache."""
    return value.flatten(0, 1) if name in PAGED else value


def pool_rows(name: str, arguments: Mapping[str, Any], *, is_written: bool) -> Tensor:
    """The rows of `pool` that a call reads or writes, int64."""
    if name not in PAGED:
        slots: Tensor = arguments["state_slots"].long()
        return slots[slots >= 0] if is_written else slots[(slots >= 0) & arguments["has_initial_state"]]
    device = arguments[name].device
    if "slot_mapping" in arguments:
        mapping: Tensor = arguments["slot_mapping"]
        return mapping[mapping >= 0] if is_written else mapping[:0]
    block_size = arguments[name].shape[1]
    rows = []
    for blocks, length in zip(arguments["block_table"].tolist(), arguments["seq_lens"].tolist(), strict=True):
        rows += [blocks[n // block_size] * block_size + n % block_size for n in range(length)]
    # Attention writes no rows.
    return torch.tensor([] if is_written else rows, dtype=torch.int64, device=device)


def kept(tensor: Tensor) -> Tensor:
    """A copy on the CPU, float32 if it is of a floating-point dtype."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)
