"""The mixture-of-experts feed-forward: router, routed experts, shared experts.

A shared expert as wide as a routed one is one more expert with weight 1 (the same sum, one launch less).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.checkpoint.config import MlpType, MoeConfig
from deltafold.checkpoint.weights import Init, Source, TensorSpec
from deltafold.layers.basic import SwiGlu, fused_rows_spec
from deltafold.layers.decoder import FeedForward, needed
from deltafold.ops import Ops


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What a checkpoint calls the parts, behind the layer's prefix; `{e}` is the expert's number."""

    router: str
    router_bias: str | None
    gate: str
    up: str
    down: str
    shared: str
    shared_gate: str | None = None
    fused_gate_up: str | None = None  # all experts' gates above ups in one tensor [E, 2 * I, D], if it has that layout
    fused_down: str | None = None  # [E, D, I]


@dataclass(frozen=True, slots=True)
class Moe:
    """E routed experts of width I and the shared ones, of which a folded one is expert E."""

    config: MoeConfig
    router: Tensor  # [E, D]; its logits are summed and kept in float32
    router_bias: Tensor | None  # [E] float32
    w13: Tensor  # [E or E + 1, 2 * I, D]
    w2: Tensor  # [E or E + 1, D, I]
    shared: SwiGlu | None
    shared_gate: Tensor | None  # [1, D]: scales what `shared` gives by a sigmoid

    @staticmethod
    def table(prefix: str, layer: str, names: MoeNames, config: MoeConfig, hidden_size: int) -> dict[str, TensorSpec]:
        """Entries under `prefix` for the checkpoint's `layer` prefix."""
        E, I, D = config.num_experts, config.intermediate_size, hidden_size  # noqa: E741
        w13 = []
        w2 = []
        for e in range(E):
            w13.append(Source((layer + names.gate.format(e=e),), (I, D), (e, slice(0, I))))
            w13.append(Source((layer + names.up.format(e=e),), (I, D), (e, slice(I, 2 * I))))
            w2.append(Source((layer + names.down.format(e=e),), (D, I), (e,)))
        table = {
            f"{prefix}router": TensorSpec((E, D), (Source((layer + names.router,), (E, D)),)),
        }
        if names.router_bias is not None:
            bias = Source((layer + names.router_bias,), (E,))
            table[f"{prefix}router_bias"] = TensorSpec((E,), (bias,), torch.float32, init=Init.ZEROS)
        if config.num_shared_experts == 1:
            w13.append(Source((f"{layer}{names.shared}gate_proj.weight",), (I, D), (E, slice(0, I))))
            w13.append(Source((f"{layer}{names.shared}up_proj.weight",), (I, D), (E, slice(I, 2 * I))))
            w2.append(Source((f"{layer}{names.shared}down_proj.weight",), (D, I), (E,)))
            E += 1
        elif config.num_shared_experts > 1:
            width = config.num_shared_experts * I
            table |= SwiGlu.table(f"{prefix}shared.", [layer + names.shared], D, width)
        elif config.gated_shared_size and names.shared_gate is not None:
            table |= SwiGlu.table(f"{prefix}shared.", [layer + names.shared], D, config.gated_shared_size)
            table[f"{prefix}shared_gate"] = fused_rows_spec([((layer + names.shared_gate,), 1)], D, None)
        fused13 = () if names.fused_gate_up is None else (Source((layer + names.fused_gate_up,), (E, 2 * I, D)),)
        fused2 = () if names.fused_down is None else (Source((layer + names.fused_down,), (E, D, I)),)
        table[f"{prefix}w13"] = TensorSpec((E, 2 * I, D), tuple(w13), split_axis=0, other_sources=fused13)
        table[f"{prefix}w2"] = TensorSpec((E, D, I), tuple(w2), split_axis=0, other_sources=fused2)
        return table

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str, config: MoeConfig) -> Moe:
        return cls(
            config=config,
            router=tensors[f"{prefix}router"],
            router_bias=tensors.get(f"{prefix}router_bias"),
            w13=tensors[f"{prefix}w13"],
            w2=tensors[f"{prefix}w2"],
            shared=SwiGlu.from_tensors(tensors, f"{prefix}shared.") if f"{prefix}shared.down" in tensors else None,
            shared_gate=tensors.get(f"{prefix}shared_gate"),
        )

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]."""
        config = self.config
        y = ops.routed_experts(
            x,
            ops.linear(x, self.router, torch.float32),
            self.router_bias,
            self.w13,
            self.w2,
            config.num_experts_per_token,
            config.scoring,
            config.num_groups,
            config.top_k_groups,
            config.best_per_group,
            config.renormalize,
            config.routed_scaling_factor,
        )
        if self.shared is None:
            return y
        shared = self.shared.forward(x, ops)
        if self.shared_gate is not None:
            shared = ops.sigmoid_mul(shared, ops.linear(x, self.shared_gate, x.dtype))
        return y + shared


def feed_forward_of(
    tensors: Mapping[str, Tensor], kind: MlpType, config: MoeConfig | None, *, moe: str, dense: str
) -> FeedForward:
    """A layer's experts from under the prefix `moe`, or its dense feed-forward from under `dense`."""
    if kind is MlpType.SPARSE:
        return Moe.from_tensors(tensors, moe, needed(config, "expert"))
    return SwiGlu.from_tensors(tensors, dense)
