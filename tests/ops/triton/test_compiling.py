"""Every kernel compiles for GPUs that are not here, fits their shared memory, and in few variants."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def rows_of(module: str, *arguments: str, cache: str) -> list[dict[str, object]]:
    """The JSON lines that a program of this folder prints; kernels as for a GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", f"tests.ops.triton.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("capability", "shared_memory"), [(90, 232448), (121, 101376)], ids=["sm_90", "sm_121"])
def test_kernels_compile_and_fit(capability, shared_memory, tmp_path):
    rows = rows_of("compiling", str(capability), str(shared_memory), cache=str(tmp_path))
    assert len({row["kernel"] for row in rows}) >= 33
    assert {"hopper_up_kernel", "hopper_down_kernel"} & {row["kernel"] for row in rows} == (
        {"hopper_up_kernel", "hopper_down_kernel"} if capability == 90 else set()
    )
    too_large = [row for row in rows if row["shared"] > shared_memory]
    assert not too_large, too_large


def test_no_kernel_is_compiled_for_what_a_count_happens_to_be(tmp_path):
    """What compiles does not depend on tokens, requests or blocks beyond the pinned tiles, so nothing compiles late."""
    rows = rows_of("variants", cache=str(tmp_path))
    assert len(rows) >= 30
    assert not [row for row in rows if row["unstable"]]
    variants = {row["kernel"]: row["variants"] for row in rows if row["variants"] > 2}
    assert variants == {
        "group_pairs_kernel": 4,
        "experts_up_kernel": 3,
        "experts_down_kernel": 3,
        "decode_combine_kernel": 3,
    }
