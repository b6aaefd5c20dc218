"""Every kernel compiles for a device with 99 KB of shared memory without a GPU, and fits. A file of its own, because a
file's tests run one after the other."""

from __future__ import annotations

from tests.ops.triton.programs import rows_of

SHARED_MEMORY = 101376


def test_kernels_compile_and_fit(tmp_path):
    rows = rows_of("compiling", "121", str(SHARED_MEMORY), cache=str(tmp_path))
    names = {row["kernel"] for row in rows}
    assert len(names) >= 33
    assert not [name for name in names if name.startswith("hopper")]
    assert not [row for row in rows if row["shared"] > SHARED_MEMORY]
