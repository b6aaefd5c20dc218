"""Runs the functions of hopper_chunked.py on the CPU: torch tensors in place of Gluon's, one program after another.

Copies into shared memory, which starts as NaN, land when they are waited for, and asynchronous products are computed
then. Layouts and barriers mean nothing here: what they are wrong about only a compiler or a GPU shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor


class Pointer:
    """Elements of a storage, by their numbers."""

    def __init__(self, memory: Tensor, offset: int | Tensor) -> None:
        self.memory, self.offset = memory, torch.as_tensor(offset)

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(torch.as_strided(tensor, (size,), (1,), 0), tensor.storage_offset())

    def __add__(self, offset: int | Tensor) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Tensor | None = None, other: float = 0) -> Tensor:
        if mask is None:
            return self.memory[self.offset]
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        return torch.where(mask, self.memory[torch.where(mask, offset, 0)], other)

    def store(self, value: int | Tensor) -> None:
        if isinstance(value, Tensor):
            assert value.dtype == self.memory.dtype, (value.dtype, self.memory.dtype)
        offset, value = torch.broadcast_tensors(self.offset, torch.as_tensor(value, dtype=self.memory.dtype))
        assert not bool((offset < 0).any())
        self.memory[offset.flatten()] = value.flatten()


class Shared:
    """A buffer of shared memory."""

    def __init__(self, cells: Tensor) -> None:
        self.cells = cells

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.cells.shape, self.cells.dtype)
        self.cells.copy_(value)

    def load(self, layout: object) -> Tensor:
        return self.cells.clone()

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.cells.permute(order))

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.cells[start : start + length])


class Copies:
    """The copies of one program into shared memory, by groups."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []

    def async_copy_global_to_shared(self, buffer: Shared, source: Pointer, mask: Tensor) -> None:
        self._open.append(lambda: buffer.store(source.load(mask)))

    def commit_group(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait_group(self, num_left: int) -> None:
        while len(self._groups) > num_left:
            for land in self._groups.pop(0):
                land()


def multiply(a: Shared, b: Shared, b_sum: Tensor, is_async: bool = False) -> Any:
    """`b_sum + a b`, or what `wait_products` makes that of."""
    result = partial(lambda: b_sum + a.cells.float() @ b.cells.float())
    return result if is_async else result()


def wait_products(num_left: int, deps: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    assert num_left == 0
    return [result() for result in deps]


def largest(x: Tensor, axis: int) -> Tensor:
    """As the hardware's: NaN only where there is nothing else."""
    return torch.where(x.isnan().all(axis), torch.nan, torch.where(x.isnan(), -torch.inf, x).amax(axis))


INSTRUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "_exp2": torch.exp2,
    "_reciprocal": torch.reciprocal,
    "_exp2_minus_abs": lambda x: torch.exp2(-x.abs()),
    "_unpack": lambda x: x.float(),
    "_pack_bf16": lambda x: x.bfloat16(),
    "_pack_fp16": lambda x: x.half(),
}
"""In place of functions that are assembly."""


def language(place: Sequence[int]) -> SimpleNamespace:
    """Gluon's operations for the program at `place`."""
    return SimpleNamespace(
        float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
        SliceLayout=lambda axis, layout: None,
        program_id=lambda axis: torch.tensor(place[axis], dtype=torch.int32),
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        load=Pointer.load, store=Pointer.store,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, torch.nan, dtype=dtype)),
        expand_dims=torch.unsqueeze, reshape=torch.reshape, permute=torch.permute, where=torch.where,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype), max=largest,
        maximum=lambda x, y: torch.fmax(x, torch.tensor(y)),
        associative_scan=lambda x, axis, combine: x.cumsum(axis),
        exp=torch.exp, rsqrt=torch.rsqrt, static_range=range, thread_barrier=lambda: None,
    )  # fmt: skip


def functions_on_cpu(module: ModuleType, place: Sequence[int]) -> dict[str, Any]:
    """The module's kernels and jit functions with torch under them, by name, for the program at `place`."""
    names: dict[str, Any] = {
        "gl": language(place),
        "async_copy": Copies(),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait_products,
    }
    for name, value in vars(module).items():
        if isinstance(value, tl.constexpr):
            names[name] = value.value
        elif hasattr(value, "fn"):
            names[name] = INSTRUCTIONS.get(name) or FunctionType(value.fn.__code__, names)
    return names


class KernelOnCpu:
    """Takes a kernel's place: called with a grid and the arguments of a launch, it runs the module's own source."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.num_launches = 0
        self._module, self._name = module, name

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, int], *args: object, num_warps: int, maxnreg: int, launch_pdl: bool, **constants: object
    ) -> None:
        self.num_launches += 1
        names = list(signature(getattr(self._module, self._name).fn).parameters)
        assert set(names[len(args) :]) == set(constants)
        values = [Pointer.to(x) if isinstance(x, Tensor) else x for x in args]
        for y in range(grid[1]):
            for x in range(grid[0]):
                functions_on_cpu(self._module, (x, y))[self._name](*values, **constants)
