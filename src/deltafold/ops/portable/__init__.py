"""The op list in vectorised PyTorch: the CPU backend, and a second opinion on any other device.

One file per family; signatures and shapes are documented once, in `ops/__init__.py`, and held to `ops/reference.py`
by the tests. Shapes that depend on data (chunk lists, block groups) are worked out on the host.
"""

from deltafold.ops.portable.conv import causal_conv
from deltafold.ops.portable.delta_rule import chunked_delta_rule, decay_gate, recurrent_delta_rule
from deltafold.ops.portable.fused import (
    delta_prefill,
    delta_step,
    greedy,
    linear,
    low_rank_delta_step,
    mla_step,
    routed_experts,
)
from deltafold.ops.portable.gqa import gqa_decode, gqa_prefill, kv_store
from deltafold.ops.portable.latent import latent_store, mla_decode, mla_prefill
from deltafold.ops.portable.moe import grouped_experts, route
from deltafold.ops.portable.norms import add_rms_norm, gated_rms_norm, rms_norm, sigmoid_mul, silu_and_mul
from deltafold.ops.portable.rotary import rotary

__all__ = [
    "add_rms_norm",
    "causal_conv",
    "chunked_delta_rule",
    "decay_gate",
    "delta_prefill",
    "delta_step",
    "gated_rms_norm",
    "gqa_decode",
    "gqa_prefill",
    "greedy",
    "grouped_experts",
    "kv_store",
    "latent_store",
    "linear",
    "low_rank_delta_step",
    "mla_decode",
    "mla_prefill",
    "mla_step",
    "recurrent_delta_rule",
    "rms_norm",
    "rotary",
    "route",
    "routed_experts",
    "sigmoid_mul",
    "silu_and_mul",
]
