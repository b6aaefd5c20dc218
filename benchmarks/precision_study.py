"""What each choice of precision changes, on one golden run: tokens matched, verdicts, divergence, bits per byte, speed.

Every row is a process of its own, `--jobs` of them side by side; what fails leaves its traceback in the row. Rows are
kept in a JSON file, so that a study can be continued and joined from several machines. `precision_variants.py` has the
ways to compute, `precision_slice.py` the full-shape model, `precision_tables.py` makes the tables and plots of
`docs/numerics.md`. The golden run is the portable backend in float32, which CI holds to transformers.

    python -m benchmarks.precision_study --jobs 11                                    # all CPU rows
    python -m benchmarks.precision_study --device cuda --backends triton,portable --sizes gate,8x16,64x128 --jobs 4
    python -m benchmarks.precision_study --slice 256 --device cuda --backends triton,portable --jobs 2
    python -m benchmarks.precision_study --device cuda --backends triton,portable --parts speed
    python -m benchmarks.precision_study --render docs/numerics
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from benchmarks.precision_slice import random_weights, write_slice
from benchmarks.precision_tables import render
from benchmarks.precision_variants import VARIANTS, Variant, loaded

from deltafold import Engine, SamplingParams
from deltafold.parity.compare import Comparison, compare
from deltafold.parity.golden import Golden, load, save
from deltafold.parity.prompts import Prompt
from deltafold.parity.record import EngineSource, record
from deltafold.parity.tolerance import BFLOAT16
from deltafold.parity.verdict import Verdict

BUILTIN = Path(str(files("deltafold"))) / "builtin"
GATE = Path(__file__).parents[1] / "tests/parity/goldens/builtin.json"
"""The golden run `gate`: 16 prompts x 32 tokens by transformers."""

PARTS = ("compare", "bytes", "speed")
WINDOW = 2048
"""Tokens scored at once for bits per byte; the windows overlap by half, and their second halves count."""

KEY = ("name", "model", "device", "backend")
"""What tells rows apart."""


@dataclass(frozen=True)
class Task:
    """One row to measure. `num_experts` 0 is the built-in model; `sizes` are prompts x tokens, or `gate`."""

    name: str
    device: str
    backend: str
    num_experts: int = 0
    sizes: tuple[str, ...] = ("8x16", "64x128")
    parts: tuple[str, ...] = PARTS

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Task:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    @property
    def model(self) -> str:
        return f"slice{self.num_experts}" if self.num_experts else "builtin"

    def golden_path(self, folder: Path, size: str) -> Path:
        """Random weights depend on the device they are drawn on."""
        model = f"{self.model}-{self.device}" if self.num_experts else self.model
        return GATE if size == "gate" else folder / f"golden-{model}-{size}.json"

    def record_goldens(self, folder: Path) -> None:
        """Those of the task's sizes that are not there yet: prompts of 32 to 64 tokens spread over held-out text."""
        missing = [size for size in self.sizes if not self.golden_path(folder, size).exists()]
        if not missing:
            return
        reference = replace(self, device=self.device if self.num_experts else "cpu", backend="portable")
        with reference.engine(Variant()) as engine:
            for size in missing:
                num_prompts, num_tokens = map(int, size.split("x"))
                ids = engine.encode(heldout_text())
                step = len(ids) // num_prompts
                prompts = [Prompt(None, tuple(ids[i * step : i * step + 32 + i % 33])) for i in range(num_prompts)]
                golden = record(prompts, EngineSource(engine), engine, max_tokens=num_tokens, ignore_eos=True)
                save(golden, self.golden_path(folder, size))

    @contextmanager
    def engine(self, variant: Variant) -> Iterator[Engine]:
        """An engine with the task's model that computes as the variant says."""
        if not self.num_experts:
            with loaded("builtin", variant, self.device, self.backend) as engine:
                yield engine
            return
        with tempfile.TemporaryDirectory() as folder, random_weights():
            write_slice(Path(folder), BUILTIN, self.num_experts, self.device)
            with loaded(folder, variant, self.device, self.backend) as engine:
                yield engine


def heldout_text() -> str:
    return (BUILTIN / "heldout_sample.txt").read_text(encoding="utf-8")


def bits_per_byte(engine: Engine, text: str) -> float:
    """The text's, its first token left out."""
    ids = engine.encode(text)
    starts = range(0, max(1, len(ids) - WINDOW // 2), WINDOW // 2)
    windows = [ids[start : start + WINDOW] for start in starts]
    completions = engine.complete_tokens(windows, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    nats = 0.0
    for i, completion in enumerate(completions):
        scored = (completion.prompt_logprobs or ())[WINDOW // 2 if i else 1 :]
        nats -= sum(entry.logprob for entry in scored if entry is not None)
    return nats / math.log(2) / (len(text.encode()) - len(engine.token_bytes(ids[0])))


def speeds(engine: Engine, device: str) -> dict[str, float]:
    """Tokens a second, the best of three: prefill of whole 2,048-token prompts, and decode of 16 sequences together by
    the difference of two output lengths. Every prompt begins with a token of its own, so that no prefix is found. On
    the CPU a second is one of this process's CPU time: others share the cores."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    num_prompts, few, many = (16, 8, 136) if device == "cuda" else (1, 4, 36)

    def seconds(prompts: list[list[int]], count: int) -> float:
        begin = clock()
        engine.complete_tokens(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        return clock() - begin

    def long_prompts(first: int, count: int) -> list[list[int]]:
        return [[first + i, *range(100, 100 + WINDOW - 1)] for i in range(count)]

    seconds(long_prompts(0, 1), 1)
    prefill = min(seconds(long_prompts(100 * i, num_prompts), 1) for i in range(1, 4))
    short = [[100 + i] * 64 for i in range(16)]
    seconds(short, few)
    decode = min(seconds(short, many) for _ in range(3)) - min(seconds(short, few) for _ in range(3))
    return {
        "prefill_tokens_per_second": num_prompts * WINDOW / prefill,
        "decode_tokens_per_second": 16 * (many - few) / max(1e-9, decode),
    }


def summary(comparison: Comparison) -> dict[str, Any]:
    """What the tables show of one comparison. Gaps and margins are of the positions with another token (nats)."""
    decoded = [p for prompt in comparison.prompts for p in prompt.decode]
    num_steps = 1 + max((p.index for p in decoded), default=0)
    quarters: list[list[float]] = [[] for _ in range(4)]
    for p in decoded:
        quarters[4 * p.index // num_steps].append(p.kl)
    parted = [p for p in comparison.positions if p.our_token != p.golden_token]
    gaps = sorted(max(p.golden_gap, p.our_gap) for p in parted)
    drifts = sorted(p.drift for p in comparison.positions)
    failures = [prompt.failure for prompt in comparison.prompts if prompt.failure]
    return {
        "num_matched": comparison.num_matched,
        "num_tokens": comparison.num_tokens,
        "num_identical": comparison.count(Verdict.IDENTICAL),
        "num_near_ties": comparison.count(Verdict.NEAR_TIE),
        "num_mismatches": comparison.count(Verdict.MISMATCH),
        "mean_kl": comparison.mean_kl,
        "decode_kl": sum(p.kl for p in decoded) / max(1, len(decoded)),
        "decode_kl_by_quarter": [sum(part) / max(1, len(part)) for part in quarters],
        "largest_prompt_kl": max(prompt.kl for prompt in comparison.prompts),
        "num_parted": len(parted),
        "num_positions": len(comparison.positions),
        "median_gap": gaps[len(gaps) // 2] if gaps else 0.0,
        "largest_gap": gaps[-1] if gaps else 0.0,
        "largest_golden_margin": max((p.golden_margin for p in parted), default=0.0),
        "largest_our_margin": max((p.our_margin for p in parted), default=0.0),
        "largest_drift": drifts[-1],
        "drift_99": drifts[int(len(drifts) * 0.99)],
        "first_failure": failures[0] if failures else None,
    }


def measure(task: Task, goldens: Path) -> Iterator[dict[str, Any]]:
    """The row, whole up to each part in turn."""
    variant = VARIANTS[task.name]
    # The engine does not know that the study rounds its states.
    limits = asdict(BFLOAT16) if variant.has_bfloat16_state else {}
    limits.pop("reason", None)
    row: dict[str, Any] = {field: getattr(task, field) for field in KEY}
    with task.engine(variant) as engine:
        row |= {"fingerprint": engine.describe()["model"]["fingerprint"], "torch": torch.__version__}
        row |= {"threads": torch.get_num_threads(), "cpu_count": os.cpu_count()}
        for size in task.sizes if "compare" in task.parts else ():
            golden: Golden = load(task.golden_path(goldens, size))
            row[size] = summary(compare(golden, engine, limits))
            yield row
        if "bytes" in task.parts and not task.num_experts:  # random weights predict nothing
            row["bits_per_byte"] = bits_per_byte(engine, heldout_text())
            yield row
        if "speed" in task.parts and not variant.is_batched_otherwise:
            row |= speeds(engine, task.device)
    yield row


def work(tasks: Sequence[Task], goldens: Path, output: Path) -> None:
    """What a worker process does: measures the tasks in turn and keeps what it has so far in `output`."""
    rows: list[dict[str, Any]] = []
    for task in tasks:
        row: dict[str, Any] = {field: getattr(task, field) for field in KEY}
        rows.append(row)
        begin = time.perf_counter()
        try:
            for found in measure(task, goldens):
                row |= found
                output.write_text(json.dumps(rows), encoding="utf-8")
        except Exception:  # noqa: BLE001  # a row that fails is a result of the study
            row["error"] = traceback.format_exc()[-4000:]
        row["seconds"] = round(time.perf_counter() - begin, 1)
        output.write_text(json.dumps(rows), encoding="utf-8")


def run_worker(goldens: Path, tasks: Sequence[Task], seconds: float) -> list[dict[str, Any]]:
    """The rows of one worker process; one that dies or takes longer than `seconds` leaves the parts it finished."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        plan = json.dumps([asdict(task) for task in tasks])
        command = [sys.executable, "-m", "benchmarks.precision_study", "--worker", plan, "--goldens"]
        command += [str(goldens), "--data", str(output)]
        problem = None
        try:
            done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, check=False)
            if done.returncode:
                problem = f"exit status {done.returncode}: {done.stderr[-4000:]}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds:.0f} s"
        rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    for task in tasks:
        if not any(all(row[field] == getattr(task, field) for field in KEY) for row in rows):
            rows.append({field: getattr(task, field) for field in KEY})
    for row in rows if problem else []:
        if "seconds" not in row:
            row["error"] = problem
    return rows


def join(rows: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`new` rows added to those of the same key; an error goes once a row succeeds."""
    joined = list(rows)
    for row in new:
        known = next((old for old in joined if all(old[field] == row[field] for field in KEY)), {})
        kept = {name: value for name, value in known.items() if name != "error"}
        joined = [old for old in joined if old is not known] + [{**kept, **row}]
    return joined


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of all files, joined."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        if path.exists():
            rows = join(rows, json.loads(path.read_text(encoding="utf-8")))
    return rows


def study(arguments: argparse.Namespace, tasks: Sequence[Task]) -> bool:
    """Measures all tasks into the first data file; whether all rows succeeded."""
    path: Path = arguments.data[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Speeds are measured in one process, one row after another: with others beside it they would be the others'.
    groups = [list(tasks)] if arguments.parts == ("speed",) else [[task] for task in tasks]
    deadline = time.monotonic() + arguments.limit
    lock = Lock()
    problems = []

    def run(group: list[Task]) -> None:
        rows = run_worker(arguments.goldens, group, max(0.0, deadline - time.monotonic()))
        with lock:
            path.write_text(json.dumps(join(read([path]), rows), indent=1) + "\n", encoding="utf-8")
            for row in rows:
                problem = row.get("error")
                problems.extend([problem] if problem else [])
                print(*(row[field] for field in KEY), row.get("seconds"), problem or "", sep="; ", flush=True)

    with ThreadPoolExecutor(1 if len(groups) == 1 else arguments.jobs) as pool:
        list(pool.map(run, groups))
    return not problems


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _names(text: str) -> list[str]:
    names = text.split(";")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"unknown rows {unknown}; there are {'; '.join(VARIANTS)}")
    return names


def _parts(text: str) -> tuple[str, ...]:
    parts = _listed(text)
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[Path("benchmarks/results/precision.json")])
    parser.add_argument("--goldens", type=Path, default=Path("build/goldens"), help="folder of the golden runs")
    parser.add_argument(
        "--rows", type=_names, help="names, ';' between them (default: all that the backend tells apart)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backends", type=_listed, default=("portable",))
    parser.add_argument("--sizes", type=_listed, default=Task.sizes, help="e.g. gate,8x16,64x128")
    parser.add_argument("--parts", type=_parts, default=PARTS)
    parser.add_argument("--slice", type=int, default=0, metavar="EXPERTS", help="four layers of the released shape")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for the whole study")
    parser.add_argument("--render", type=Path, metavar="PREFIX", help="only write plots and print the tables")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        fields = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()} for x in json.loads(arguments.worker)
        ]
        work([Task(**found) for found in fields], arguments.goldens, arguments.data[0])
        return
    if arguments.render:
        print(render(read(arguments.data), arguments.render))
        return
    if arguments.slice and "gate" in arguments.sizes:
        parser.error("the golden run 'gate' is of the built-in model, not of --slice")
    tasks = [
        Task(name, arguments.device, backend, arguments.slice, arguments.sizes, arguments.parts)
        for backend in arguments.backends
        for name in arguments.rows or VARIANTS
        if arguments.rows or backend == "triton" or not VARIANTS[name].is_eager
    ]
    if "compare" in arguments.parts:
        arguments.goldens.mkdir(parents=True, exist_ok=True)
        tasks[0].record_goldens(arguments.goldens)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(0 if study(arguments, tasks) else 1)


if __name__ == "__main__":
    main()
