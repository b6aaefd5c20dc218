"""What kernels share and what differs between devices: overlapped launches, tile loads, products.

With programmatic dependent launch a kernel's start-up overlaps the end of the one before it. Every kernel launched
so calls `wait_for_predecessor` before it touches memory that another kernel writes, or writes memory another reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


class Overlap(TypedDict):
    """Launch arguments: `PDL` reaches the kernel, `launch_pdl` the launcher."""

    PDL: bool
    launch_pdl: bool


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What launches depend on beside their arguments."""

    arch: str  # sm_90 and so on; pins may have entries of it
    num_multiprocessors: int
    shared_memory: int  # bytes a program may use
    has_overlap: bool  # whether launches overlap: compute capability 9.0 and up


NO_DEVICE = DeviceFacts(arch="none", num_multiprocessors=4, shared_memory=232448, has_overlap=False)
"""Where there is no GPU (Triton's interpreter): room as on Hopper."""


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Of a GPU, its own. `kernels/recording.py` puts those of a GPU that is not here in this function's place."""
    if device.type != "cuda":
        return NO_DEVICE
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        arch=f"sm_{properties.major}{properties.minor}",
        num_multiprocessors=properties.multi_processor_count,
        shared_memory=int(properties.shared_memory_per_block_optin),  # type: ignore[attr-defined]
        has_overlap=properties.major >= 9,
    )


def has_overlap(tensor: Tensor) -> bool:
    """Whether the tensor's device overlaps launches."""
    return device_facts(tensor.device).has_overlap


def overlap(tensor: Tensor) -> Overlap:
    """Launch arguments for the device of `tensor`."""
    has_pdl = has_overlap(tensor)
    return Overlap(PDL=has_pdl, launch_pdl=has_pdl)


def arch_of(tensor: Tensor) -> str:
    """The tensor's device's architecture, sm_90 and so on; "none" where there is no GPU."""
    return device_facts(tensor.device).arch


def shared_memory(tensor: Tensor) -> int:
    """Bytes of shared memory a program may use on the tensor's device; as on Hopper where there is no GPU."""
    return device_facts(tensor.device).shared_memory


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Blocks until the kernel before this one has ended and lets the next one start up meanwhile."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(b_a, b_b, b_sum):
    """`b_sum + b_a b_b` on the matrix units; float32 is not rounded to tf32, and of two dtypes the wider wins.

    The interpreter's dot takes bfloat16 for the integers that hold it.
    """
    if INTERPRETED or b_a.dtype != b_b.dtype:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_sum, input_precision="ieee")


@triton.jit
def load_tile(source, row, col, end_row, end_col, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Rows `row : row + ROWS`, columns `col : col + COLS` of a matrix with dense rows `stride` apart.

    From a pointer, what lies from `end_row` or `end_col` on is zero; from a descriptor (TMA) only what lies outside the
    whole matrix is, so the caller asks only for tiles whose excess it ignores.
    """
    if TMA:
        b_tile = source.load([row, col])
    else:
        o_r = row + tl.arange(0, ROWS)
        o_c = col + tl.arange(0, COLS)
        mask = (o_r < end_row)[:, None] & (o_c < end_col)[None, :]
        b_tile = tl.load(source + o_r.to(tl.int64)[:, None] * stride + o_c[None, :], mask=mask, other=0.0)
    return b_tile


def tile_source(matrix: Tensor, rows: int, cols: int) -> tuple[Any, bool]:
    """What `load_tile` reads [rows, cols] tiles of a dense matrix from, and its TMA flag: a descriptor, or the matrix
    itself where its rows or its address lack the 16 bytes of alignment that the copy engine asks for."""
    if matrix.numel() == 0 or (matrix.shape[1] * matrix.element_size()) % 16 or matrix.data_ptr() % 16:
        return matrix, False
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, cols]), True


MIN_FULL_MEMORY = 200_000
"""Bytes of shared memory that the larger tiles need."""


def is_compact(tensor: Tensor) -> bool:
    """Whether tiles of this dtype must be small: the tiles pinned for data-centre GPUs and two-byte numbers fill 227 KB
    of shared memory; other devices have 99 KB, and float32 needs twice the room."""
    return shared_memory(tensor) < MIN_FULL_MEMORY or tensor.element_size() > 2


def num_multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device; 4 where there is no GPU (Triton's interpreter)."""
    return device_facts(tensor.device).num_multiprocessors
