"""A short name for a checkpoint's content: equal for equal models, different for different ones.

Reads config.json, every safetensors header, and of each tensor its first and last bytes: enough to tell any two
trained checkpoints apart without reading 100 GB. Sessions and golden runs carry it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from deltafold.checkpoint.safetensors_file import read_headers

SAMPLE_BYTES = 2048
"""Bytes taken from either end of each tensor."""


def fingerprint(folder: Path) -> str:
    """32 hex digits; WeightsError if the tensors cannot be read."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for name, stored in sorted(read_headers(folder).items()):
        digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        with stored.path.open("rb") as file:
            size = min(SAMPLE_BYTES, stored.num_bytes)
            for start in (stored.offset, stored.offset + stored.num_bytes - size):
                file.seek(start)
                digest.update(file.read(size))
    return digest.hexdigest()
