"""The full shape of Kimi-Linear-48B-A3B with random weights on one GPU: the table of docs/performance-notes.md.

Decode is the difference of two output lengths over the same prompts, best of two; prefill is the time to the first
token, best of two. Prints a table, and one JSON line. `--layers 4` runs a slice, for trying the script.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

START = time.perf_counter()

VOCAB = 163840
TARGETS = {
    "decode b1": (1.95, "ms"),
    "decode b1 at 131072": (2.30, "ms"),
    "decode b8": (6.5, "ms"),
    "decode b32": (15.9, "ms"),
    "decode b64": (21.8, "ms"),
    "decode b128": (26.0, "ms"),
    "prefill 1 x 1024": (0.035, "s"),
    "prefill 1 x 8192": (80_000, "tok/s"),
    "prefill 4 x 8192": (80_000, "tok/s"),
    "prefill 1 x 32768": (62_000, "tok/s"),
    "prefill 1 x 131072": (36_000, "tok/s"),
    "start to first token": (20, "s"),
}


def full_config(num_layers: int) -> dict[str, Any]:
    """config.json of the published model, or of its first layers."""
    from deltafold.kernels.targets import published_config

    config = published_config("kimi-linear-48b")
    layers = config["linear_attn_config"]
    full = [i for i in layers["full_attn_layers"] if i <= num_layers]
    linear = [i for i in layers["kda_layers"] if i <= num_layers]
    changed = layers | {"kda_layers": linear, "full_attn_layers": full}
    return config | {"num_hidden_layers": num_layers, "linear_attn_config": changed}


def write_folder(folder: Path, num_layers: int) -> None:
    """A model's folder without weights: the full configuration, and the built-in model's tokenizer."""
    with as_file(files("deltafold") / "builtin") as builtin:
        for path in builtin.iterdir():
            if path.suffix in (".json", ".jinja", ".model"):
                shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(full_config(num_layers)))


class Bench:
    """An engine, and how long it takes for random prompts."""

    def __init__(self, engine: Any) -> None:
        from deltafold import SamplingParams

        self.engine, self._params, self._draw = engine, SamplingParams, random.Random(0)

    def seconds(self, num: int, length: int, num_tokens: int, repeats: int = 2) -> float:
        """Best of `repeats` for `num` fresh prompts of `length` random ids and `num_tokens` tokens each."""
        return min(self._seconds(num, length, num_tokens) for _ in range(repeats))

    def _seconds(self, num: int, length: int, num_tokens: int) -> float:
        prompts = [[self._draw.randrange(VOCAB) for _ in range(length)] for _ in range(num)]
        params = self._params(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        completions = self.engine.complete_tokens(prompts, params)
        seconds = time.perf_counter() - start
        assert all(len(completion.token_ids) == num_tokens for completion in completions)
        return seconds

    def decode_ms(self, batch: int, length: int, steps: int = 64, repeats: int = 2) -> float:
        """Milliseconds a step, from two output lengths."""
        short = self.seconds(batch, length, 2, repeats)
        return 1000 * (self.seconds(batch, length, 2 + steps, repeats) - short) / steps


def run(bench: Bench, cases: Sequence[str]) -> dict[str, float]:
    """The rows asked for, by name."""
    rows: dict[str, float] = {}
    bench.seconds(1, 1024, 8)  # lets clocks and allocators settle
    for name in cases:
        words = name.split()
        if words[0] == "decode":
            length = int(words[3]) if len(words) > 2 else 1024
            rows[name] = bench.decode_ms(int(words[1][1:]), length, repeats=1 if length > 100_000 else 2)
        else:
            num, length = int(words[1]), int(words[3])
            seconds = bench.seconds(num, length, 1, repeats=1 if length > 100_000 else 2)
            rows[name] = seconds if TARGETS[name][1] == "s" else num * length / seconds
        print(f"{name:24} {rows[name]:12.3f} {TARGETS[name][1]:6} target {TARGETS[name][0]}", flush=True)
    return rows


def main() -> int:
    """Prints the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--residual-dtype", default="float32")
    parser.add_argument("--cases", nargs="*", default=[name for name in TARGETS if name != "start to first token"])
    parser.add_argument("--no-decode-graphs", action="store_true")
    parser.add_argument("--kernel-pack", type=Path)
    arguments = parser.parse_args()

    import torch

    from deltafold import Engine, SamplingParams

    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), arguments.layers)
        with Engine.load(
            name,
            device="cuda",
            weights="random",
            seed=0,
            prefix_cache=False,
            residual_dtype=arguments.residual_dtype,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            decode_graphs=not arguments.no_decode_graphs,
            kernel_pack=arguments.kernel_pack,
        ) as engine:
            ready = time.perf_counter() - START
            engine.complete_tokens([1, 2, 3], SamplingParams(max_tokens=1, temperature=0))
            first = time.perf_counter() - START
            print(f"ready after {ready:.1f} s, first token after {first:.1f} s")
            print(json.dumps(engine.describe()["memory"]))
            rows = run(Bench(engine), arguments.cases) | {"start to first token": first}
            backend = engine.describe()["backend"]
            kernels = engine.describe()["kernels"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "backend": backend,
        "kernel_pack": kernels["pack"],
        "num_made_by_jit": kernels["num_made_by_jit"],
        "layers": arguments.layers,
        "residual_dtype": arguments.residual_dtype,
        "commit": commit,
        "rows": rows,
    }
    print(json.dumps(report))
    return int(any(_misses(name, value) for name, value in rows.items()))


def _misses(name: str, value: float) -> bool:
    target, unit = TARGETS[name]
    return value < target if unit == "tok/s" else value > target


if __name__ == "__main__":
    sys.exit(main())
