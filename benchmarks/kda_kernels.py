"""The delta rule's kernels alone at the shape of Kimi-Linear (H = 32, K = V = 128, bfloat16), beside `fla-core` where
that is installed (`--no-peer` leaves it out; it tunes itself for a minute and more).

Ours: median over replays of a CUDA graph that holds the call several times, and of single eager calls; the peer: eager
calls with its own recommended arguments. Gates as vLLM's recipe of `docs/performance-notes.md` draws them. Errors are
relative, against the float32 recurrence. Prints a table and ends in one JSON line. Needs a GPU with 8 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from deltafold.ops import portable, select

H, K, V, W = 32, 128, 128, 4
D = 2 * H * K + H * V
Call = Callable[[], object]

ops = select("triton")


@dataclass(frozen=True)
class Row:
    """One case: what to call, on how many different inputs in turn, the peer's call, and the target in microseconds."""

    name: str
    calls: list[Call]
    peer: Call | None = None
    target: float | None = None


@dataclass(frozen=True)
class Layer:
    """Inputs of one layer for T tokens, and its pools."""

    qkv: Tensor  # [T, D]
    raw_gate: Tensor  # [T, H, K]
    beta_logits: Tensor  # [T, H]
    out_gate: Tensor  # [T, H, V]
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]
    conv_weight: Tensor  # [D, W]
    conv_state: Tensor  # [S, D, W - 1]
    state: Tensor  # [S, H, K, V]

    @classmethod
    def random(cls, T: int, num_slots: int) -> Layer:
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        return cls(
            qkv=randn(T, D),
            raw_gate=randn(T, H, K) * 0.5,
            beta_logits=randn(T, H),
            out_gate=randn(T, H, V),
            A_log=torch.empty(H, device="cuda").uniform_(1, 16).log(),
            dt_bias=torch.empty(H, K, device="cuda").uniform_(-4.6, -2.3),
            conv_weight=torch.rand(D, W, device="cuda").sub_(0.5).bfloat16(),
            conv_state=randn(num_slots, D, W - 1),
            state=torch.randn(num_slots, H, K, V, device="cuda") * 0.1,
        )

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, H, K] and v [T, H, V], taken as the convolution leaves them."""
        q, k, v = self.qkv.split([H * K, H * K, H * V], dim=-1)
        return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (H, V))

    def gates(self) -> tuple[Tensor, Tensor]:
        """g and beta in float32, as the ops without a gate take them."""
        return portable.decay_gate(self.raw_gate, self.A_log, self.dt_bias), torch.sigmoid(self.beta_logits.float())


def requests(lengths: list[int], first_slot: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """query_start_loc, state_slots, has_initial_state."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    slots = torch.arange(first_slot, first_slot + len(lengths), dtype=torch.int32, device="cuda")
    return starts, slots, torch.ones(len(lengths), dtype=torch.bool, device="cuda")


def elapsed(call: Call, replays: int) -> float:
    """Median microseconds of a call, by events."""
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graphed(calls: list[Call], repeats: int) -> float:
    """Median microseconds of one of the calls out of a graph that holds them `repeats` times in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    graph.replay()
    return elapsed(graph.replay, 15) / repeats


def prefill_row(T: int, target: float, fla: object | None) -> Row:
    layer = Layer.random(T, 1)
    gates = (layer.raw_gate, layer.beta_logits, layer.A_log, layer.dt_bias)
    call = partial(ops.delta_prefill, *layer.heads(), *gates, layer.state, *requests([T]))
    peer = None
    if fla is not None:
        q, k, v = (x[None].contiguous() for x in layer.heads())
        peer = partial(
            fla.chunk_kda,  # type: ignore[attr-defined]
            q=q, k=k, v=v, g=layer.raw_gate[None], beta=layer.beta_logits[None],
            A_log=layer.A_log, dt_bias=layer.dt_bias.flatten(), initial_state=layer.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
    return Row(f"chunked prefill T={T}", [call], peer, target)


def decode_row(B: int, target: float, fla: object | None) -> Row:
    num_sets = max(1, 8 // B)
    layer = Layer.random(B, num_sets * B)
    inputs = (*layer.heads(), *layer.gates())
    calls: list[Call] = [
        partial(ops.recurrent_delta_rule, *inputs, layer.state, *requests([1] * B, i * B)) for i in range(num_sets)
    ]
    peer = None
    if fla is not None:
        q, k, v = (x[:, None].contiguous() for x in layer.heads())
        peer = partial(
            fla.fused_recurrent_kda,  # type: ignore[attr-defined]
            q=q, k=k, v=v, g=layer.raw_gate[:, None], beta=layer.beta_logits[:, None],
            A_log=layer.A_log, dt_bias=layer.dt_bias.flatten(), initial_state=layer.state[:B], output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
    return Row(f"recurrent decode B={B}", calls, peer, target)


def step_row(B: int) -> Row:
    num_sets = max(1, 8 // B)
    layer = Layer.random(B, num_sets * B)
    weight = torch.ones(V, device="cuda").bfloat16()
    gates = (layer.raw_gate, layer.beta_logits, layer.A_log, layer.dt_bias, layer.out_gate)
    inputs = (layer.qkv, layer.conv_weight, layer.conv_state, *gates, weight, 1e-5, "sigmoid", layer.state)
    calls: list[Call] = [partial(ops.delta_step, *inputs, *requests([1] * B, i * B)[1:]) for i in range(num_sets)]
    return Row(f"layer's decode step B={B}", calls)


def pointwise_rows(T: int) -> list[Row]:
    layer = Layer.random(T, 1)
    conv = partial(ops.causal_conv, layer.qkv, layer.conv_weight, layer.conv_state, *requests([T]))
    v, weight = layer.heads()[2], torch.ones(V, device="cuda").bfloat16()
    norm = partial(ops.gated_rms_norm, v, layer.out_gate, weight, 1e-5, "sigmoid")
    return [Row(f"convolution T={T}", [conv]), Row(f"gated norm T={T}", [norm])]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors(T: int) -> dict[str, float]:
    """Of both forms, after T tokens with an initial state, against the float32 recurrence in PyTorch."""
    layer = Layer.random(T, 1)
    inputs = (*layer.heads(), *layer.gates())
    expected_state = layer.state.clone()
    floats = (x.float() for x in inputs)
    expected = portable.recurrent_delta_rule(*floats, expected_state, *requests([T]))
    result = {}
    for rule in ("chunked_delta_rule", "recurrent_delta_rule"):
        state = layer.state.clone()
        out = getattr(ops, rule)(*inputs, state, *requests([T]))
        result[f"{rule} output"] = relative_error(out, expected)
        result[f"{rule} state"] = relative_error(state, expected_state)
    return result


def about() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--no-peer", action="store_true", help="do not time fla-core")
    has_peer = not parser.parse_args().no_peer and importlib.util.find_spec("fla") is not None
    fla = importlib.import_module("fla.ops.kda") if has_peer else None
    measured_errors = errors(1024)
    for name, error in measured_errors.items():
        print(f"{name:<36}{error:>10.1e}")
    makers: list[Callable[[], list[Row]]] = [
        *(lambda T=T, target=t: [prefill_row(T, target, fla)] for T, t in ((1024, 120), (8192, 500), (32768, 1900))),
        *(lambda B=B, target=t: [decode_row(B, target, fla)] for B, t in ((1, 8), (64, 70), (128, 135))),
        *(lambda B=B: [step_row(B)] for B in (1, 8, 64, 128)),
        partial(pointwise_rows, 8192),
    ]
    result: dict[str, dict[str, float | None]] = {}
    print(f"{'case (us)':<36}{'graph':>10}{'eager':>10}{'peer':>10}{'target':>10}")
    with torch.inference_mode():
        for row in (row for make in makers for row in make()):
            figures: dict[str, float | None] = {
                "graph": graphed(row.calls, 24 if "prefill" not in row.name else 4),
                "eager": elapsed(row.calls[0], 15),
                "peer": None,
                "target": row.target,
            }
            if row.peer is not None:
                row.peer()  # tunes itself
                figures["peer"] = elapsed(row.peer, 15)
            result[row.name] = figures
            cells = ("-" if x is None else f"{x:.1f}" for x in figures.values())
            print(f"{row.name:<36}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    print(json.dumps({"kda_kernels": result, "errors": measured_errors, **about()}))


if __name__ == "__main__":
    main()
