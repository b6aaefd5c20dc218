"""Fixtures of the kernel tests."""

from tests.ops.triton.devices import poisoned_memory

__all__ = ["poisoned_memory"]
