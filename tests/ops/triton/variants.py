"""How many compilations the ops ask for, over many counts of tokens and requests. `python -m tests.ops.triton.variants`
prints one JSON line a kernel. Run as a program for the reason in compiling.py."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from tests.ops.triton.compiling import Launch, bf16, f32, i32, record, type_of
from torch import Tensor

from deltafold.ops import triton as ops

D, H, R, P, K, V, E, WIDTH, W = 2304, 32, 512, 64, 128, 128, 16, 1024, 4
CHANNELS = 3 * H * K
PROMPTS = ((1, 1), (2, 1), (5, 1), (17, 1), (64, 1), (65, 1), (130, 2), (200, 3), (2048, 17), (4096, 1), (4096, 8))
STEPS = (1, 2, 3, 5, 8, 16, 17, 64)
BLOCKS = (1, 16, 100, 2048)


def specialised(launch: Launch) -> tuple[dict[str, object], tuple[object, ...]]:
    """What the launcher makes of the integers of a launch (1, a multiple of 16, wide), and all else it compiles for."""
    numbers, rest = {}, []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if isinstance(value, int) and not parameter.is_constexpr:
            values = (None, None) if parameter.do_not_specialize else (value == 1, value % 16 == 0)
            numbers[parameter.name] = (*values, value >= 2**31)
        elif parameter.is_constexpr or value is None:
            rest.append(value)
        else:
            rest.append(type_of(value))
    return numbers, (*rest, *launch.options.items())


def bools(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.bool)


def prompt_calls(T: int, N: int, blocks: int) -> Iterator[Callable[[], object]]:
    x = bf16(T, CHANNELS + 4096 + H)
    q, k, v = (y.unflatten(-1, (H, K)) for y in x[:, :CHANNELS].split(H * K, -1))
    requests = (i32(N + 1), i32(N), bools(N))
    taps, state = bf16(2, CHANNELS, W - 1), f32(2, H, K, V)
    w13, w2 = bf16(E + 1, 2 * WIDTH, D), bf16(E + 1, D, WIDTH)
    cache, kv_b = bf16(4, 64, R + P), bf16(H, K + V, R)
    yield lambda: ops.causal_conv(x[:, :CHANNELS], bf16(CHANNELS, W), taps, *requests)
    yield lambda: ops.delta_prefill(q, k, v, bf16(T, H, K), x[:, -H:], f32(H), f32(H, K), state, *requests)
    yield lambda: ops.gated_rms_norm(bf16(T, H, V), bf16(T, H, V), bf16(V), 1e-5, "sigmoid")
    yield lambda: ops.rms_norm(bf16(T, D), bf16(D), 1e-5, torch.bfloat16)
    yield lambda: ops.add_rms_norm(bf16(T, D), f32(T, D), bf16(D), 1e-5, torch.bfloat16)
    yield lambda: ops.silu_and_mul(bf16(T, 2 * 9216))
    yield lambda: ops.latent_store(bf16(T, R), bf16(T, P), cache, torch.empty(T, dtype=torch.int64))
    yield lambda: ops.mla_prefill(bf16(T, H, K + P), kv_b, cache, i32(N + 1), i32(N), i32(N, blocks), 1.0)
    yield lambda: ops.routed_experts(bf16(T, D), f32(T, E), f32(E), w13, w2, 8, "sigmoid", 1, 1, 2, True, 2.0)
    yield from attention_calls(T, N, blocks)


def attention_calls(T: int, N: int, blocks: int) -> Iterator[Callable[[], object]]:
    """Of models with keys and values: 16 heads of 256 on 2."""
    q, kv, slots = bf16(T, 16, 256), bf16(T, 2, 256), torch.empty(T, dtype=torch.int64)
    caches = (bf16(4, 64, 2, 256), bf16(4, 64, 2, 256))
    yield lambda: ops.rotary(q, slots, f32(32), 1.0, False)
    yield lambda: ops.kv_store(kv, kv, *caches, slots)
    yield lambda: ops.gqa_prefill(q, *caches, i32(N + 1), i32(N), i32(N, blocks), 1.0)
    yield lambda: ops.sigmoid_mul(bf16(T, 4096), bf16(T, 4096))


def step_calls(N: int, blocks: int) -> Iterator[Callable[[], object]]:
    gates = (bf16(N, H, K), bf16(N, H), f32(H), f32(H, K), bf16(N, H, V), bf16(V), 1e-5, "sigmoid")
    taps, pools = bf16(2, CHANNELS, W - 1), (f32(2, H, K, V), i32(N), bools(N))
    cache, kv_b = bf16(4, 64, R + P), bf16(H, K + V, R)
    yield lambda: ops.delta_step(bf16(N, CHANNELS), bf16(CHANNELS, W), taps, *gates, *pools)
    low = bf16(N, 2 * K + H)[:, :K]
    low_rank = (low, bf16(H * K, K), bf16(N, H), f32(H), f32(H, K), low, bf16(H * V, K), bf16(V), 1e-5, "sigmoid")
    yield lambda: ops.low_rank_delta_step(bf16(N, CHANNELS), bf16(CHANNELS, W), taps, *low_rank, *pools)
    yield lambda: ops.greedy(f32(N, 163840))
    yield lambda: ops.mla_step(bf16(N, H, K + P), kv_b, cache, i32(N), i32(N, blocks), 1.0)
    caches = (bf16(4, 64, 2, 256), bf16(4, 64, 2, 256))
    yield lambda: ops.gqa_decode(bf16(N, 16, 256), *caches, i32(N), i32(N, blocks), 1.0)


def calls() -> Iterator[Callable[[], object]]:
    for T, N in PROMPTS:
        yield from prompt_calls(T, N, math.ceil(T / 64))
    for N in STEPS:
        for blocks in BLOCKS:
            yield from step_calls(N, blocks)


def main() -> None:
    numbers: dict[str, dict[str, set[object]]] = defaultdict(lambda: defaultdict(set))
    variants: dict[str, set[object]] = defaultdict(set)
    for call in calls():
        for launch in record(call, 232448):
            ints, rest = specialised(launch)
            variants[launch.kernel.__name__].add(rest)
            for name, value in ints.items():
                numbers[launch.kernel.__name__][name].add(value)
    for kernel, rows in variants.items():
        unstable = sorted(name for name, values in numbers[kernel].items() if len(values) > 1)
        print(json.dumps({"kernel": kernel, "variants": len(rows), "unstable": unstable}), flush=True)


if __name__ == "__main__":
    main()
