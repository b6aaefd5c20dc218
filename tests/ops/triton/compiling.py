"""Compiles what ops launch for GPUs that are not here. Run as a program, because kernels imported for the interpreter
cannot be compiled: `python -m tests.ops.triton.compiling CAPABILITY SHARED_MEMORY`, one JSON line a kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import nvidia
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from deltafold.ops import triton as ops
from deltafold.ops.triton import launch

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, object]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that need one compilation."""
        source = self.source()
        return (self.kernel.__name__, *source.signature.items(), *source.constants.items(), *self.options.items())

    def source(self) -> ASTSource:
        """As the launcher specialises: pointers and integers that 16 divides are marked so."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
                continue
            signature[parameter.name] = type_of(value)
            is_aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            if is_aligned and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, signature, constexprs=constants, attrs=attributes)


def type_of(value: object) -> str:
    """Triton's name for an argument's type."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, nvidia.hopper.TensorDescriptor):
        return str(mangle_type(value))
    return "fp32" if isinstance(value, float) else "i32"


def record(call: Callable[[], object], shared_memory: int, capability: int = 90) -> list[Launch]:
    """The launches of a call, none of which runs; as on a GPU that overlaps launches."""
    launches = []

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        launches.append(Launch(kernel, arguments | kwargs, options))

    facts = launch.DeviceFacts(f"sm_{capability}", 132, shared_memory, has_overlap=True)
    with patch.object(JITFunction, "run", run), patch.object(launch, "device_facts", lambda device: facts):
        call()
    return launches


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.empty(*shape)


def i32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def calls() -> Iterator[Callable[[], object]]:
    """Ops at the widths of the full model, at token counts that reach every pinned tile."""
    D, H, R, P, K, V, E, width = 2304, 32, 512, 64, 128, 128, 16, 1024
    w13, w2, kv_b = bf16(E + 1, 2 * width, D), bf16(E + 1, D, width), bf16(H, K + V, R)
    for T in (1, 8, 40, 100, 400, 8192):
        yield lambda T=T: ops.routed_experts(bf16(T, D), f32(T, E), f32(E), w13, w2, 8, "sigmoid", 1, 1, 2, True, 2.0)
    yield lambda: ops.route(f32(3, 64), None, 6, "softmax", 8, 3, 1, False, 1.0)
    yield lambda: ops.rms_norm(f32(3, D), bf16(D), 1e-5, torch.bfloat16)
    yield lambda: ops.add_rms_norm(bf16(3, D), f32(3, D), bf16(D), 1e-5, torch.bfloat16)
    yield lambda: ops.silu_and_mul(bf16(3, 2 * 9216))
    cache, table, lengths = bf16(256, 64, R + P), i32(1, 256), i32(1)
    yield lambda: ops.latent_store(bf16(3, R), bf16(3, P), cache, torch.empty(3, dtype=torch.int64))
    yield lambda: ops.mla_step(bf16(1, H, K + P), kv_b, cache, lengths, table, 1.0)
    yield lambda: ops.mla_prefill(bf16(200, H, K + P), kv_b, cache, i32(2), lengths, table, 1.0)
    yield from delta_calls()
    yield from attention_calls()
    yield lambda: ops.greedy(f32(3, 163840))
    for T, N in ((1, D), (1, 12576), (8, D), (8, 12576)):
        yield lambda T=T, N=N: ops.linear(bf16(T, D), bf16(N, D), torch.bfloat16)


def delta_calls() -> Iterator[Callable[[], object]]:
    """The delta rule's ops: a prompt, steps of few and of many requests; slices where layers pass them."""
    H, K, V, W = 32, 128, 128, 4
    D = 3 * H * K
    A_log, dt_bias, weight, state, taps = f32(H), f32(H, K), bf16(D, W), f32(4, H, K, V), bf16(4, D, W - 1)
    starts, slots, has_state = i32(2), i32(1), torch.empty(1, dtype=torch.bool)
    gates = (bf16(200, H, K), bf16(200, D + H)[:, D:], A_log, dt_bias)
    q, k, v = (x.unflatten(-1, (H, K)) for x in bf16(200, D).split(H * K, dim=-1))
    yield lambda: ops.delta_prefill(q, k, v, *gates, state, starts, slots, has_state)
    yield lambda: ops.recurrent_delta_rule(q, k, v, f32(200, H, K), f32(200, H), state, starts, slots, has_state)
    yield lambda: ops.causal_conv(bf16(200, D + H)[:, :D], weight, taps, starts, slots, has_state)
    yield lambda: ops.decay_gate(bf16(3, H, K), A_log, dt_bias)
    yield lambda: ops.gated_rms_norm(bf16(3, H, V), bf16(3, H, V), bf16(V), 1e-5, "sigmoid")
    for N in (1, 64):
        inputs = (bf16(N, H, K), bf16(N, H), A_log, dt_bias, bf16(N, H, V), bf16(V), 1e-5, "sigmoid")
        pools = (state, i32(N), torch.empty(N, dtype=torch.bool))
        yield lambda N=N, inputs=inputs, pools=pools: ops.delta_step(bf16(N, D), weight, taps, *inputs, *pools)
        low, up, out_up = bf16(N, 2 * K + H)[:, :K], bf16(H * K, K), bf16(H * V, K)
        inputs = (low, up, bf16(N, H), A_log, dt_bias, low, out_up, bf16(V), 1e-5, "sigmoid")
        yield lambda N=N, inputs=inputs, pools=pools: ops.low_rank_delta_step(bf16(N, D), weight, taps, *inputs, *pools)


def attention_calls() -> Iterator[Callable[[], object]]:
    """Attention with keys and values of its own, at the widths of Qwen3.5-35B-A3B; rotation of neighbours and halves;
    the delta rule with a gate a head."""
    H, HK, K, table, lengths = 16, 2, 256, i32(1, 256), i32(1)
    caches = (bf16(256, 64, HK, K), bf16(256, 64, HK, K))
    slots = torch.empty(3, dtype=torch.int64)
    yield lambda: ops.kv_store(bf16(3, HK, K), bf16(3, HK, K), *caches, slots)
    yield lambda: ops.gqa_prefill(bf16(200, H, K), *caches, i32(2), lengths, table, 1.0)
    yield lambda: ops.gqa_decode(bf16(1, H, K), *caches, lengths, table, 1.0)
    yield lambda: ops.rotary(bf16(3, H, K), slots, f32(32), 1.0, False)
    yield lambda: ops.rotary(bf16(3, 128, 192)[..., 128:], slots, f32(32), 1.0, True)
    yield lambda: ops.sigmoid_mul(bf16(3, H * K), bf16(3, H * K))
    yield lambda: ops.sigmoid_mul(bf16(3, 2048), bf16(3, 1))
    HV, V = 32, 128
    D = 2 * 16 * 128 + HV * V
    step = (bf16(1, HV), bf16(1, HV), f32(HV), f32(HV), bf16(1, HV, V), bf16(V), 1e-6, "silu")
    pools = (f32(4, HV, 128, V), lengths, torch.empty(1, dtype=torch.bool))
    yield lambda: ops.delta_step(bf16(1, D), bf16(D, 4), bf16(4, D, 3), *step, *pools)
    q, v = bf16(200, 16, 128), bf16(200, HV, V)
    gates = (bf16(200, HV), bf16(200, HV), f32(HV), f32(HV))
    yield lambda: ops.delta_prefill(q, q, v, *gates, pools[0], i32(2), *pools[1:])


def main(capability: int, shared_memory: int) -> None:
    launches = {launch.key: launch for call in calls() for launch in record(call, shared_memory, capability)}
    for launched in launches.values():
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(launched.source(), target=target, options=launched.options)
        constants = {k: v for k, v in launched.arguments.items() if isinstance(v, int) and k.isupper()}
        row = {"kernel": launched.kernel.__name__, "constants": constants, "shared": compiled.metadata.shared}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
