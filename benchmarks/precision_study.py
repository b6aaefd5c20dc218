"""What each choice of precision changes, on one golden run: tokens matched, verdicts, divergence, bits per byte, speed.

Rows are measured one by one and kept in a JSON file, so that a study can be continued and joined from several machines;
`--render` draws the table and plots of `docs/numerics.md` from it. The golden run is the portable backend in float32 on
the CPU, which the gate in `tests/parity/test_builtin.py` holds to transformers.

    python benchmarks/precision_study.py                                          # all CPU rows (an hour on 2 cores)
    python benchmarks/precision_study.py --device cuda --backends portable,triton # GPU rows, golden run as recorded
    python benchmarks/precision_study.py --slice 256 --device cuda --backends portable,triton
    python benchmarks/precision_study.py --render docs/numerics
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltafold import Engine, SamplingParams
from deltafold.cache.memory import LayerCache
from deltafold.checkpoint.config import load_config
from deltafold.checkpoint.weights import random_tensors
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.mla import Mla
from deltafold.models import model_class
from deltafold.ops import Ops
from deltafold.parity.compare import Comparison, compare
from deltafold.parity.golden import Golden, load, save
from deltafold.parity.plots import Line, bars, log_lines
from deltafold.parity.prompts import Prompt
from deltafold.parity.record import EngineSource, record
from deltafold.parity.tolerance import BFLOAT16
from deltafold.parity.verdict import Verdict

BUILTIN = Path(str(files("deltafold"))) / "builtin"
SIZES = ((8, 16), (64, 128))
"""Prompts x tokens."""

WINDOW = 2048
"""Tokens scored at once for bits per byte; the windows overlap by half, and their second halves count."""


@dataclass(frozen=True)
class Variant:
    """One way to compute. The last three are not options of an engine: the study changes the loaded model."""

    dtype: str = "float32"
    residual_dtype: str = "float32"
    is_batched_otherwise: bool = False
    has_bfloat16_state: bool = False
    has_recurrent_prefill: bool = False
    has_expanded_decode: bool = False


VARIANTS = {
    "float32": Variant(),
    "float32, other batches": Variant(is_batched_otherwise=True),
    "float32, residual bfloat16": Variant(residual_dtype="bfloat16"),
    "float32, state bfloat16": Variant(has_bfloat16_state=True),
    "float32, recurrent prefill": Variant(has_recurrent_prefill=True),
    "float32, expanded decode": Variant(has_expanded_decode=True),
    "bfloat16": Variant(dtype="bfloat16"),
    "bfloat16, residual bfloat16": Variant(dtype="bfloat16", residual_dtype="bfloat16"),
    "bfloat16, state bfloat16": Variant(dtype="bfloat16", has_bfloat16_state=True),
    "bfloat16, recurrent prefill": Variant(dtype="bfloat16", has_recurrent_prefill=True),
    "bfloat16, expanded decode": Variant(dtype="bfloat16", has_expanded_decode=True),
}


class StudyOps:
    """An op list with the delta rule changed: states rounded after every call, prefills by the recurrence."""

    def __init__(self, ops: Ops, variant: Variant) -> None:
        self._ops = ops
        self._variant = variant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def chunked_delta_rule(self, *args: Tensor) -> Tensor:
        op = self._ops.recurrent_delta_rule if self._variant.has_recurrent_prefill else self._ops.chunked_delta_rule
        return self._rounded(op(*args), state=args[5], slots=args[7])

    def recurrent_delta_rule(self, *args: Tensor) -> Tensor:
        return self._rounded(self._ops.recurrent_delta_rule(*args), state=args[5], slots=args[7])

    def delta_prefill(self, q: Tensor, k: Tensor, v: Tensor, raw_gate: Tensor, beta: Tensor, *rest: Tensor) -> Tensor:
        A_log, dt_bias, *state = rest
        g = self._ops.decay_gate(raw_gate, A_log, dt_bias)
        return self.chunked_delta_rule(q, k, v, g, torch.sigmoid(beta.float()), *state)

    def delta_step(self, *args: Any) -> Tensor:
        return self._rounded(self._ops.delta_step(*args), state=args[11], slots=args[12])

    def _rounded(self, output: Tensor, *, state: Tensor, slots: Tensor) -> Tensor:
        if self._variant.has_bfloat16_state:
            live = slots[slots >= 0].long()
            state[live] = state[live].bfloat16().float()
        return output


@dataclass(frozen=True)
class ExpandedMla:
    """A latent attention layer that treats decodes as prefills of one token."""

    mixer: Mla

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        expanded = replace(batch, num_decodes=0, prefill_start_loc=batch.query_start_loc)
        return self.mixer.forward(x, expanded, cache, ops)


@contextmanager
def loaded(model: str, variant: Variant, device: str, backend: str) -> Iterator[Engine]:
    """An engine that computes as the variant says."""
    options: dict[str, Any] = {"max_num_seqs": 64}
    if variant.is_batched_otherwise:
        options = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "prefix_cache": False}
    engine = Engine.load(
        model,
        device=device,  # type: ignore[arg-type]  # the command line's choices are the literals
        dtype=variant.dtype,  # type: ignore[arg-type]
        residual_dtype=variant.residual_dtype,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        show_progress=False,
        **options,
    )
    with engine:
        inner: Any = engine._core.runner.model
        if variant.has_bfloat16_state or variant.has_recurrent_prefill:
            inner.ops = StudyOps(inner.ops, variant)
        if variant.has_expanded_decode:
            inner._layers = [
                replace(layer, mixer=ExpandedMla(layer.mixer)) if isinstance(layer.mixer, Mla) else layer
                for layer in inner._layers
            ]
        yield engine


def heldout_text() -> str:
    return (BUILTIN / "heldout_sample.txt").read_text(encoding="utf-8")


def golden_run(path: Path, model: str, num_prompts: int, num_tokens: int) -> Golden:
    """The stored golden run, or a new one: prompts of 32 to 64 tokens spread over the held-out text."""
    if path.exists():
        return load(path)
    with loaded(model, Variant(), "cpu", "portable") as engine:
        ids = engine.encode(heldout_text())
        step = len(ids) // num_prompts
        prompts = [Prompt(None, tuple(ids[i * step : i * step + 32 + i % 33])) for i in range(num_prompts)]
        save(record(prompts, EngineSource(engine), engine, max_tokens=num_tokens, ignore_eos=True), path)
    return load(path)


def bits_per_byte(engine: Engine, num_bytes: int) -> tuple[float, float]:
    """Of the held-out sample's first `num_bytes`, and the prompt tokens a second that scoring took."""
    text = heldout_text().encode()[:num_bytes].decode(errors="ignore")
    ids = engine.encode(text)
    starts = range(0, max(1, len(ids) - WINDOW // 2), WINDOW // 2)
    windows = [ids[start : start + WINDOW] for start in starts]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    begin = time.perf_counter()
    completions = engine.complete_tokens(windows, params)
    seconds = time.perf_counter() - begin
    nats = 0.0
    for i, completion in enumerate(completions):
        scored = (completion.prompt_logprobs or ())[WINDOW // 2 if i else 1 :]
        nats -= sum(entry.logprob for entry in scored if entry is not None)
    first = len(engine.decode(ids[:1]).encode())
    return nats / math.log(2) / (len(text.encode()) - first), sum(map(len, windows)) / seconds


def decode_rate(engine: Engine) -> float:
    """Tokens a second of 16 sequences together, the difference of two output lengths."""
    prompts = [[i] * 64 for i in range(16)]

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        engine.complete_tokens(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        return time.perf_counter() - begin

    seconds(2)
    return 16 * 16 / max(1e-9, seconds(20) - seconds(4))


def summary(comparison: Comparison) -> dict[str, Any]:
    """What the table shows of one comparison."""
    decoded = [p for prompt in comparison.prompts for p in prompt.decode]
    gaps = [max(p.golden_gap, p.our_gap) for p in comparison.positions]
    drifts = sorted(p.drift for p in comparison.positions)
    return {
        "num_matched": comparison.num_matched,
        "num_tokens": comparison.num_tokens,
        "num_identical": comparison.count(Verdict.IDENTICAL),
        "num_near_ties": comparison.count(Verdict.NEAR_TIE),
        "num_mismatches": comparison.count(Verdict.MISMATCH),
        "mean_kl": comparison.mean_kl,
        "decode_kl": sum(p.kl for p in decoded) / len(decoded),
        "largest_prompt_kl": max(prompt.kl for prompt in comparison.prompts),
        "num_parted": sum(p.our_token != p.golden_token for p in comparison.positions),
        "num_positions": len(comparison.positions),
        "largest_gap": max(gaps),
        "largest_drift": drifts[-1],
        "drift_99": drifts[int(len(drifts) * 0.99)],
    }


def measure(arguments: argparse.Namespace, model: str, name: str, backend: str) -> dict[str, Any]:
    """One row."""
    variant = VARIANTS[name]
    # The engine does not know that the study rounds its states.
    limits = asdict(BFLOAT16) if variant.has_bfloat16_state else {}
    limits.pop("reason", None)
    row: dict[str, Any] = {"name": name, "device": arguments.device, "backend": backend, "model": arguments.model_name}
    with loaded(model, variant, arguments.device, backend) as engine:
        row["fingerprint"] = engine.describe()["model"]["fingerprint"]
        row["torch"], row["threads"] = torch.__version__, torch.get_num_threads()
        for num_prompts, num_tokens in arguments.sizes:
            path = arguments.data.with_name(f"golden-{arguments.model_name}-{num_prompts}x{num_tokens}.json")
            golden = golden_run(path, model, num_prompts, num_tokens)
            row[f"{num_prompts}x{num_tokens}"] = summary(compare(golden, engine, limits))
        if arguments.bytes:
            row["bits_per_byte"], row["prefill_tokens_per_second"] = bits_per_byte(engine, arguments.bytes)
        row["decode_tokens_per_second"] = decode_rate(engine)
    return row


def write_slice(folder: Path, num_experts: int) -> None:
    """Four layers of the released shape (three delta layers, one latent attention) with random weights; the vocabulary
    is the built-in tokenizer's. 256 experts are 12 GB."""
    config = json.loads((BUILTIN / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": num_experts,
        "num_experts_per_token": min(8, num_experts),
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    from safetensors.torch import save_file

    parsed = load_config(folder)
    table = model_class(parsed.architecture).parameter_table(parsed)
    tensors = random_tensors(table, compute_dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    stored = {
        source.names[0]: tensors[key][source.index].reshape(source.checkpoint_shape).contiguous()
        for key, spec in table.items()
        for source in spec.sources
    }
    save_file(stored, folder / "model.safetensors")


def render(rows: Sequence[dict[str, Any]], prefix: Path) -> None:
    """The table (Markdown, on stdout) and two plots beside `prefix`."""
    sizes = [f"{prompts}x{tokens}" for prompts, tokens in SIZES]
    print(
        "| row | device, ops | "
        + " | ".join(f"tokens matched, {size}" for size in sizes)
        + " | prompts identical / near tie / mismatch | KL a token: prefill, decode | largest gap | bits per byte "
        + "| prefill, decode tok/s |"
    )
    print("| --- | --- | " + "---: | " * (len(sizes) + 5))
    for row in rows:
        counts = [
            f"{row[size]['num_matched']} of {row[size]['num_tokens']}" if size in row else "not run" for size in sizes
        ]
        last = row[next(size for size in reversed(sizes) if size in row)]
        verdicts = f"{last['num_identical']} / {last['num_near_ties']} / {last['num_mismatches']}"
        bpb = f"{row['bits_per_byte']:.5f}" if "bits_per_byte" in row else "not run"
        speed = f"{row.get('prefill_tokens_per_second', 0):.0f}, {row['decode_tokens_per_second']:.0f}"
        cells = [row["name"], f"{row['device']}, {row['backend']}", *counts, verdicts]
        cells.append(f"{last['mean_kl']:.1e}, {last['decode_kl']:.1e}")
        print("| " + " | ".join([*cells, f"{last['largest_gap']:.3f}", bpb, speed]) + " |")
    labels = [str(i + 1) for i in range(len(rows))]
    last_of = [row[next(size for size in reversed(sizes) if size in row)] for row in rows]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    kl = [
        Line("prefill", [found["mean_kl"] for found in last_of]),
        Line("decode", [found["decode_kl"] for found in last_of]),
    ]
    plot = log_lines("Divergence from float32 by row (nats a token)", labels, kl, limit=None)
    prefix.with_name(f"{prefix.name}-divergence.svg").write_text(plot, encoding="utf-8")
    share = [Line("matched", [100 * found["num_matched"] / found["num_tokens"] for found in last_of])]
    plot = bars("Tokens matched by row (%)", labels, share)
    prefix.with_name(f"{prefix.name}-tokens.svg").write_text(plot, encoding="utf-8")


def _sizes(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (size.split("x") for size in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/results/precision.json"), help="rows so far")
    parser.add_argument("--rows", default=",".join(VARIANTS).replace(", ", ";"), help="names, ';' for ', '")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backends", default="portable")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="e.g. 8x16,64x128")
    parser.add_argument("--bytes", type=int, default=2**20, help="of the held-out sample; 0 leaves it out")
    parser.add_argument("--slice", type=int, metavar="EXPERTS", help="the released shape's four layers, random weights")
    parser.add_argument("--render", type=Path, metavar="PREFIX", help="only write plots and print the table")
    arguments = parser.parse_args()
    rows = json.loads(arguments.data.read_text(encoding="utf-8")) if arguments.data.exists() else []
    if arguments.render:
        render(rows, arguments.render)
        return
    arguments.data.parent.mkdir(parents=True, exist_ok=True)
    arguments.model_name = f"slice{arguments.slice}" if arguments.slice else "builtin"
    with tempfile.TemporaryDirectory() as folder:
        if arguments.slice:
            arguments.bytes = 0  # random weights predict nothing
            write_slice(Path(folder), arguments.slice)
        for backend in arguments.backends.split(","):
            for name in arguments.rows.replace(";", "\0").split(","):
                row = measure(arguments, folder if arguments.slice else "builtin", name.replace("\0", ", "), backend)
                print(json.dumps(row), flush=True)
                key = ("name", "device", "backend", "model")
                known = next((old for old in rows if all(old[field] == row[field] for field in key)), {})
                rows = [old for old in rows if old is not known] + [{**known, **row}]
                arguments.data.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
