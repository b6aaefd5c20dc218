"""MoE, latent attention, norm and projection kernels alone, at the shapes of the full model, beside their floors.

Each figure is the median over replays of a CUDA graph that holds the call on several inputs, so that the L2 cache holds
none of them. The floor is bytes over the measured copy rate or operations over the measured GEMM rate, whichever is
longer. Prints a table and ends in one JSON line. Needs a GPU with 16 GB.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from deltafold.ops import select

HIDDEN, HEADS, RANK, EXTRA, NOPE, VALUE = 2304, 32, 512, 64, 128, 128
EXPERTS, TOP_K, WIDTH, BLOCK_SIZE = 256, 8, 1024, 64
SCALE = (NOPE + EXTRA) ** -0.5
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 700e6
"""Copy and 8192^3 GEMM of one H200, as measured for performance.md."""

ops = select("triton")


@dataclass(frozen=True)
class Row:
    """One case: its name, the calls of one graph, and the bytes and operations of one call."""

    name: str
    calls: Sequence[Callable[[], object]]
    num_bytes: float
    flops: float = 0.0


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 11) -> float:
    """Median time of one of the calls, out of a captured graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def moe_rows() -> list[Row]:
    w13, w2 = randn(EXPERTS + 1, 2 * WIDTH, HIDDEN), randn(EXPERTS + 1, HIDDEN, WIDTH)
    w13.mul_(0.02)
    w2.mul_(0.02)
    bias = torch.zeros(EXPERTS, device="cuda")
    expert_bytes, pair_flops = 3 * WIDTH * HIDDEN * 2, 2 * 3 * WIDTH * HIDDEN
    rows = []
    for T in (1, 2, 4, 8, 32, 64, 128, 1024, 8192):
        inputs = [(randn(T, HIDDEN), randn(T, EXPERTS, dtype=torch.float32)) for _ in range(2 if T > 4 else 6)]
        touched = [1 + len(torch.unique(logits.topk(TOP_K).indices)) for _, logits in inputs]
        calls = [
            lambda x=x, logits=logits: ops.routed_experts(
                x, logits, bias, w13, w2, TOP_K, "sigmoid", 1, 1, 2, True, 2.446
            )
            for x, logits in inputs
        ]
        mean_touched = statistics.mean(touched)
        rows.append(Row(f"experts T={T}", calls, mean_touched * expert_bytes, T * (TOP_K + 1) * pair_flops))
    return rows


def paged_context(N: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = length // BLOCK_SIZE
    table = torch.randperm(N * blocks, device="cuda").int().view(N, blocks)
    return randn(N * blocks, BLOCK_SIZE, RANK + EXTRA), torch.full((N,), length, device="cuda").int(), table


def attention_rows() -> list[Row]:
    rows = []
    kv_b = randn(HEADS, NOPE + VALUE, RANK) * RANK**-0.5
    for N, length in ((1, 1024), (1, 131072), (8, 1024), (64, 1024), (128, 1024)):
        q, context = randn(N, HEADS, NOPE + EXTRA), paged_context(N, length)
        num_bytes = N * length * (RANK + EXTRA) * 2 + kv_b.numel() * 2
        calls = [lambda q=q, context=context: ops.mla_step(q, kv_b, *context, SCALE)] * 12
        rows.append(Row(f"latent step N={N} context {length}", calls, num_bytes))
    for T, length in ((1024, 1024), (8192, 8192), (8192, 131072)):
        q, context = randn(T, HEADS, NOPE + EXTRA), paged_context(1, length)
        start_loc = torch.tensor([0, T], dtype=torch.int32, device="cuda")
        pairs = T * (length - T) + T * (T + 1) / 2
        flops = 2 * HEADS * (pairs * (NOPE + EXTRA + VALUE) + length * RANK * (NOPE + VALUE))
        call = partial(ops.mla_prefill, q, kv_b, context[0], start_loc, *context[1:], SCALE)
        rows.append(Row(f"latent prefill T={T} context {length}", [call], length * (RANK + EXTRA) * 2, flops))
    return rows


def small_rows() -> list[Row]:
    rows = []
    weight = randn(HIDDEN)
    for T in (1, 64, 8192):
        x, residual = randn(T, HIDDEN), randn(T, HIDDEN, dtype=torch.float32)
        logits = randn(T, EXPERTS, dtype=torch.float32)
        bias = torch.zeros(EXPERTS, device="cuda")
        norm = partial(ops.add_rms_norm, x, residual, weight, 1e-5, torch.bfloat16)
        route = partial(ops.route, logits, bias, TOP_K, "sigmoid", 1, 1, 2, True, 2.446)
        rows.append(Row(f"add + norm T={T}", [norm] * 24, T * HIDDEN * (2 + 4 + 4 + 2)))
        rows.append(Row(f"route T={T}", [route] * 24, T * EXPERTS * 4))
    return rows


def linear_rows() -> list[Row]:
    rows = []
    for N, K in ((12576, HIDDEN), (HIDDEN, 4096), (EXPERTS, HIDDEN), (163840, HIDDEN)):
        weights = [randn(N, K) for _ in range(max(2, int(2e8 / (N * K * 2))))]
        dtype = torch.float32 if N == EXPERTS else torch.bfloat16
        for T in (1, 8, 16, 64):
            x = randn(T, K)
            calls = [lambda x=x, w=w, dtype=dtype: ops.linear(x, w, dtype) for w in weights]
            rows.append(Row(f"linear {N} x {K} T={T}", calls, N * K * 2, 2 * T * N * K))
    return rows


def main() -> None:
    result: dict[str, dict[str, float]] = {}
    print(f"{'case':<36}{'us':>10}{'floor':>10}{'ratio':>8}")
    for make in (moe_rows, attention_rows, small_rows, linear_rows):
        for row in make():
            time = microseconds(row.calls)
            floor = max(row.num_bytes / BYTES_PER_US, row.flops / FLOPS_PER_US)
            result[row.name] = {"us": time, "floor_us": floor}
            print(f"{row.name:<36}{time:>10.1f}{floor:>10.1f}{time / floor:>8.2f}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    about = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
    }
    print(json.dumps({"op_kernels": result, **about}))


if __name__ == "__main__":
    main()
