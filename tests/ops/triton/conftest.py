"""Fixtures of the kernel tests."""

from tests.ops.triton.devices import on_hopper, poisoned_memory

__all__ = ["on_hopper", "poisoned_memory"]
