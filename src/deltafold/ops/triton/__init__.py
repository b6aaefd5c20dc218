"""The op list as Triton kernels: the GPU backend, and in Triton's interpreter a slow CPU one for tests.

One file per family; signatures and shapes are documented once, in `ops/__init__.py`, and held to `ops/reference.py`
by the tests. No op waits for the device, and no shape depends on what is in a tensor.
"""

from deltafold.ops.triton.attention import mla_decode, mla_step
from deltafold.ops.triton.conv import causal_conv
from deltafold.ops.triton.delta_chunked import chunked_delta_rule, delta_prefill
from deltafold.ops.triton.delta_decode import delta_step, low_rank_delta_step
from deltafold.ops.triton.delta_recurrent import recurrent_delta_rule
from deltafold.ops.triton.gate import decay_gate
from deltafold.ops.triton.gated_norm import gated_rms_norm
from deltafold.ops.triton.gqa import gqa_decode, gqa_prefill, kv_store
from deltafold.ops.triton.greedy import greedy
from deltafold.ops.triton.latent import latent_store
from deltafold.ops.triton.linear import linear
from deltafold.ops.triton.moe import grouped_experts, routed_experts
from deltafold.ops.triton.norm import add_rms_norm, rms_norm, sigmoid_mul, silu_and_mul
from deltafold.ops.triton.prefill import mla_prefill
from deltafold.ops.triton.rotary import rotary
from deltafold.ops.triton.router import route

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
