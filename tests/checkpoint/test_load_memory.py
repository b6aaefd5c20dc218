"""Loading keeps one tensor staged: the process's peak is the weights, the largest tensor and what torch itself takes.

The measurement runs in its own process, because a peak never falls.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

NUM_SHARDS = 8
SHARD_VALUES = 8 * 2**20
"""Values of the largest tensor of a shard."""

LOAD = """
import sys
from pathlib import Path
import torch
from deltafold.checkpoint.weights import Source, TensorSpec, load_tensors

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

num_shards, values = int(sys.argv[2]), int(sys.argv[3])
shapes = {f"w.{i}.{part}": (values // divisor,) for i in range(num_shards) for part, divisor in (("a", 1), ("b", 2))}
table = {name: TensorSpec(shape, (Source((name,), shape),)) for name, shape in shapes.items()}
before = peak()
tensors = load_tensors(Path(sys.argv[1]), table, compute_dtype=torch.bfloat16, device=torch.device("cpu"))
print(before, peak(), sum(tensor.nbytes for tensor in tensors.values()))
"""


def _write_shards(folder: Path) -> None:
    """Shards of float32 zeros, converted while they load; the files are sparse, so that little is written."""
    weight_map = {}
    for shard in range(NUM_SHARDS):
        sizes = {f"w.{shard}.a": SHARD_VALUES, f"w.{shard}.b": SHARD_VALUES // 2}
        header, offset = {}, 0
        for name, size in sizes.items():
            end = offset + size * 4
            header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        file = f"model-{shard:05}.safetensors"
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
        weight_map |= dict.fromkeys(sizes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_peak_memory(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(NUM_SHARDS), str(SHARD_VALUES)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    before, peak, weights = (int(word) for word in result.stdout.split())
    largest = SHARD_VALUES * 4
    assert weights == NUM_SHARDS * SHARD_VALUES * 3
    assert peak <= weights + largest + 600 * 2**20
    # Sharper than the bound above: mapped pages, or a second copy of any shard, are more than this margin.
    assert peak - before <= weights + largest + 16 * 2**20
