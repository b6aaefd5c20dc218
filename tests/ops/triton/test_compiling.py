"""Every kernel compiles for GPUs that are not here, and fits their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("capability", "shared_memory"), [(90, 232448), (121, 101376)], ids=["sm_90", "sm_121"])
def test_kernels_compile_and_fit(capability, shared_memory, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.ops.triton.compiling", str(capability), str(shared_memory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["kernel"] for row in rows}) >= 33
    too_large = [row for row in rows if row["shared"] > shared_memory]
    assert not too_large, too_large
