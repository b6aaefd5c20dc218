"""What reaches the driver at a launch, against expectations made by hand."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kernels.fake_cuda import MAP_MARK, FakeCuda

from deltafold import DeviceError, KernelPackError
from deltafold.kernels.launcher import LaunchAttribute, LaunchConfig, LibCuda, PackedKernel
from deltafold.kernels.pack import PackedLaunch, TensorMap

PLAIN = PackedLaunch(
    kernel="ops.some_kernel",
    symbol="some_kernel",
    key="k",
    grid="(T,)",
    signature={"p_x": "*bf16", "D": "constexpr", "stride": "i64", "n": "i32", "scale": "fp32", "flag": "u1"},
    divisible=["p_x"],
    constants={"D": 64},
    options={},
    num_warps=8,
    shared=1024,
    launch_pdl=True,
    tensor_maps=(),
    cubin="c",
)
MAPPED = replace(
    PLAIN,
    signature={"p_x": "*fp32", "w": "tensordesc<bf16[64, 128]>", "n": "i32"},
    tensor_maps=(TensorMap(swizzle=3, elem_size=2, elem_type=10, block_size=(64, 128)),),
)


def memory(address: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: address)


def matrix(address: int, rows: int, cols: int, padding: str = "zero") -> Any:
    return SimpleNamespace(base=memory(address), shape=[rows, cols], strides=[cols, 1], padding=padding)


def packed(launch: PackedLaunch, cuda: FakeCuda) -> PackedKernel:
    return PackedKernel(launch, b"cubin", LibCuda(cuda), max_shared=232448)


def start(kernel: PackedKernel, *values: Any, grid: tuple[int, int, int] = (3, 2, 1), stream: int = 9) -> None:
    kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)


def test_structures_have_the_sizes_that_the_driver_reads() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56
    offsets = (LaunchConfig.shared_bytes.offset, LaunchConfig.stream.offset, LaunchConfig.attributes.offset)
    assert (*offsets, LaunchConfig.num_attributes.offset) == (24, 32, 40, 48)


def test_scalars_and_pointers_are_passed_in_order_and_constants_are_not() -> None:
    cuda = FakeCuda()
    start(packed(PLAIN, cuda), memory(0x7F00_0000_1230), 64, -5_000_000_000, -7, 0.5, True)
    (seen,) = cuda.launches
    assert seen.function == 6001
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((3, 2, 1), (256, 1, 1), 1024, 9)
    assert seen.attributes == [(6, 1)]
    heads = [m[: len(e)] for m, e in zip(seen.memory, expected_plain(), strict=True)]
    assert heads == expected_plain()
    assert all(address % 8 == 0 for address in seen.addresses)


def expected_plain() -> list[bytes]:
    return [
        struct.pack("<Q", 0x7F00_0000_1230),
        struct.pack("<q", -5_000_000_000),
        struct.pack("<i", -7),
        struct.pack("<f", 0.5),
        b"\x01",
        bytes(8),  # no scratch memory
        bytes(8),
    ]


def test_a_second_launch_replaces_every_value() -> None:
    cuda = FakeCuda()
    kernel = packed(replace(PLAIN, launch_pdl=False), cuda)
    start(kernel, memory(16), 64, 1, 2, 3.0, False)
    start(kernel, memory(32), 64, 4, 5, 6.0, True, grid=(1, 1, 7), stream=0)
    first, second = cuda.launches
    assert (second.grid, second.stream, second.attributes) == ((1, 1, 7), 0, [])
    assert struct.unpack("<Q", first.memory[0]) == (16,)
    assert struct.unpack("<Q", second.memory[0]) == (32,)
    assert [struct.unpack("<i", s.memory[2][:4])[0] for s in cuda.launches] == [2, 5]


def test_a_descriptor_becomes_a_tensor_map_its_sizes_and_its_strides() -> None:
    cuda = FakeCuda()
    start(packed(MAPPED, cuda), memory(48), matrix(0x1000, 5000, 2304), 11)
    (encoded,) = cuda.maps
    assert encoded == {
        "dtype": 9,  # bfloat16 on the host's side
        "base": 0x1000,
        "dims": [2304, 5000],
        "strides": [4608],
        "box": [128, 64],
        "steps": [1, 1],
        "interleave, swizzle, promotion, fill": (0, 3, 2, 0),
    }
    (seen,) = cuda.launches
    assert seen.addresses[1] % 128 == 0
    assert len(seen.memory[1]) == 128
    assert seen.memory[1].startswith(MAP_MARK)
    assert [struct.unpack("<i", m[:4])[0] for m in seen.memory[2:4]] == [5000, 2304]
    assert [struct.unpack("<q", m)[0] for m in seen.memory[4:6]] == [2304, 1]
    assert struct.unpack("<i", seen.memory[6][:4]) == (11,)
    assert seen.memory[7:] == [bytes(8), bytes(8)]


def test_nan_padding_and_element_types_reach_the_driver() -> None:
    cuda = FakeCuda()
    how = TensorMap(swizzle=2, elem_size=4, elem_type=9, block_size=(16, 32))
    launch = replace(MAPPED, tensor_maps=(how,))
    start(packed(launch, cuda), memory(16), matrix(0x2000, 7, 64, padding="nan"), 1)
    assert cuda.maps[0]["dtype"] == 8
    assert cuda.maps[0]["strides"] == [256]
    assert cuda.maps[0]["interleave, swizzle, promotion, fill"] == (0, 2, 2, 1)


def test_much_shared_memory_is_asked_for_and_little_is_not() -> None:
    cuda = FakeCuda()
    packed(PLAIN, cuda)
    assert cuda.attributes_set == []
    packed(replace(PLAIN, shared=100_000), cuda)
    assert cuda.attributes_set == [(6002, 8, 232448 - 24)]


def test_an_empty_grid_launches_nothing() -> None:
    cuda = FakeCuda()
    start(packed(PLAIN, cuda), memory(16), 64, 1, 2, 3.0, False, grid=(0, 2, 1))
    assert cuda.launches == []


def test_a_thread_without_a_context_gets_that_of_the_load() -> None:
    cuda = FakeCuda(refused=[("cuLaunchKernelEx", 201)])
    start(packed(PLAIN, cuda), memory(16), 64, 1, 2, 3.0, False)
    assert cuda.contexts_bound == [77]
    assert len(cuda.launches) == 2


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuTensorMapEncodeTiled"])
def test_the_driver_s_errors_are_raised_with_the_kernel_s_name(name: str) -> None:
    cuda = FakeCuda(refused=[(name, 719)])
    with pytest.raises(DeviceError, match=r"ops\.some_kernel: CUDA error 719: text of 719"):
        start(packed(MAPPED, cuda), memory(16), matrix(0x1000, 64, 128), 1)


def test_a_cubin_that_the_driver_refuses_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cuModuleLoadData: CUDA error 200"):
        packed(PLAIN, FakeCuda(refused=[("cuModuleLoadData", 200)]))


def test_types_that_no_launch_passes_are_refused_by_name() -> None:
    with pytest.raises(KernelPackError, match=r"ops\.some_kernel: parameter h has type fp16"):
        packed(replace(PLAIN, signature={"h": "fp16"}), FakeCuda())
