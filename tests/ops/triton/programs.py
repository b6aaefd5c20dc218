"""Runs a program of this folder with kernels as for a GPU: those imported for the interpreter cannot be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def rows_of(module: str, *arguments: str, cache: str) -> list[dict[str, object]]:
    """The JSON lines that a program of this folder prints; kernels as for a GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", f"tests.ops.triton.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
