"""Every kernel compiles for Hopper without a GPU and fits its memory (test_compiling_sm_121.py: for less of it)."""

from __future__ import annotations

from tests.ops.triton.programs import rows_of

SHARED_MEMORY = 232448


def test_kernels_compile_and_fit(tmp_path):
    rows = rows_of("compiling", "90", str(SHARED_MEMORY), cache=str(tmp_path))
    names = {row["kernel"] for row in rows}
    assert len(names) >= 33
    assert {"hopper_prefill_kernel", "hopper_up_kernel", "hopper_down_kernel", "hopper_intra_chunk_kernel"} <= names
    assert not [row for row in rows if row["shared"] > SHARED_MEMORY]
