"""Launches a pack's cubins through libcuda alone, where Triton would compile a launcher in C.

Parameters and tensor maps are laid out as Triton 3.6 does for the same kernel; `load.py` puts `PackedKernel` where
`JITFunction.run` looks for what it has compiled.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from deltafold.errors import DeviceError, KernelPackError
from deltafold.kernels.pack import PackedLaunch, TensorMap

MAX_STATIC_SHARED = 49152
"""A kernel that takes more must be allowed to."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
SHARED_SIZE_BYTES = 1
PREFER_SHARED = 1  # CUfunc_cache
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
INVALID_CONTEXT = 201
L2_PROMOTION_128B, FILL_NAN = 2, 1

TENSOR_MAP_BYTES = 128
"""Size of a CUtensorMap, and its alignment as a parameter."""

SCALARS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
"""Types of scalar parameters, as `struct` writes them."""

HOST_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
"""CUtensorMapDataType for the compiler's numbers, where they differ."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes behind it at offset 8."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


class LibCuda:
    """The driver's functions that a launch needs; every call raises on an error code."""

    def __init__(self, library: Any = None) -> None:
        """`library` stands in for libcuda in tests."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise DeviceError(f"the CUDA driver cannot be loaded: {error}") from error
        self.launch = self._library.cuLaunchKernelEx
        self.encode = self._library.cuTensorMapEncodeTiled
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        self._context = context

    def call(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self._library, name)(*arguments), name)

    def check(self, code: int, what: str) -> None:
        """DeviceError with the driver's text unless `code` is success."""
        if code != 0:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            raise DeviceError(f"{what}: CUDA error {code}: {(text.value or b'unknown').decode()}")

    def bind_context(self) -> None:
        """Makes the context of the thread that loaded the kernels the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    def load(self, cubin: bytes, symbol: str, shared: int, max_shared: int) -> c_void_p:
        """A kernel's handle; its module stays loaded as long as the process lives."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), cubin)
        self.call("cuModuleGetFunction", byref(function), module, symbol.encode())
        if shared > MAX_STATIC_SHARED:
            self.call("cuFuncSetCacheConfig", function, PREFER_SHARED)
            static = c_int()
            self.call("cuFuncGetAttribute", byref(static), SHARED_SIZE_BYTES, function)
            room = max_shared - static.value
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
        return function


class Arguments:
    """The memory that a launch's parameters are written to, and the addresses of them that the driver takes.

    One launch at a time may use it. Each scalar has 8 bytes, each tensor map 128, aligned so; two pointers to scratch
    memory, which no packed kernel has, are the last parameters.
    """

    def __init__(self, launch: PackedLaunch, cuda: LibCuda) -> None:
        self._cuda = cuda
        self._kernel = launch.kernel
        self._maps: list[tuple[int, TensorMap, Any]] = []  # parameter, how it is read, where its map goes
        self._readers: list[tuple[int, str]] = []  # parameter, "pointer", "scalar" or "descriptor"
        layout: list[tuple[str, int]] = []  # "map" or a struct letter, number in its region
        letters = self._plan(launch, layout)
        num_maps = len(self._maps)
        self._buffer = (c_ubyte * (TENSOR_MAP_BYTES * (num_maps + 1) + 8 * len(letters)))()
        start = -ctypes.addressof(self._buffer) % TENSOR_MAP_BYTES
        self._scalars_at = start + TENSOR_MAP_BYTES * num_maps
        self._format = struct.Struct("=" + "".join(f"{x}{8 - struct.calcsize('=' + x)}x" for x in letters))
        base = ctypes.addressof(self._buffer)
        self.addresses = (c_void_p * len(layout))(
            *(
                base + (start + TENSOR_MAP_BYTES * i if kind == "map" else self._scalars_at + 8 * i)
                for kind, i in layout
            )
        )
        self._maps = [(i, how, base + start + TENSOR_MAP_BYTES * n) for n, (i, how, _) in enumerate(self._maps)]

    def _plan(self, launch: PackedLaunch, layout: list[tuple[str, int]]) -> list[str]:
        letters: list[str] = []

        def add(*kinds: str) -> None:
            for kind in kinds:
                layout.append((kind, len(letters)))
                letters.append(kind)

        maps = iter(launch.tensor_maps)
        for i, (name, kind) in enumerate(launch.signature.items()):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                self._readers.append((i, "pointer"))
                add("Q")
            elif kind.startswith("tensordesc"):
                how = next(maps)
                layout.append(("map", len(self._maps)))
                self._maps.append((i, how, None))
                self._readers.append((i, "descriptor"))
                add(*"i" * len(how.block_size), *"q" * len(how.block_size))
            elif kind in SCALARS:
                self._readers.append((i, "scalar"))
                add(SCALARS[kind])
            else:
                raise KernelPackError(f"{launch.kernel}: parameter {name} has type {kind}, which no launch can pass")
        add("Q", "Q")
        return letters

    def write(self, values: Sequence[Any]) -> None:
        """The values of all parameters, those compiled in too."""
        flat: list[Any] = []
        for i, kind in self._readers:
            value = values[i]
            if kind == "scalar":
                flat.append(value)
            elif kind == "pointer":
                flat.append(value.data_ptr())
            else:
                flat += [*value.shape, *value.strides]
        self._format.pack_into(self._buffer, self._scalars_at, *flat, 0, 0)
        for i, how, address in self._maps:
            self._encode(values[i], how, address)

    def _encode(self, descriptor: Any, how: TensorMap, address: int) -> None:
        """The driver counts axes from the innermost, and strides in bytes without the innermost."""
        rank = len(how.block_size)
        shape = list(descriptor.shape)
        if how.fp4_padded:
            shape[-1] *= 2
        strides = [how.elem_size * stride for stride in descriptor.strides[:-1]]
        code = self._cuda.encode(
            c_void_p(address),
            HOST_ELEMENT_TYPES.get(how.elem_type, how.elem_type),
            rank,
            c_void_p(descriptor.base.data_ptr()),
            (c_uint64 * rank)(*reversed(shape)),
            (c_uint64 * max(1, rank - 1))(*reversed(strides)),
            (c_uint32 * rank)(*reversed(how.block_size)),
            (c_uint32 * rank)(*[1] * rank),
            0,
            how.swizzle,
            L2_PROMOTION_128B,
            FILL_NAN if descriptor.padding == "nan" else 0,
        )
        self._cuda.check(code, f"tensor map of {self._kernel}")


class PackedKernel:
    """What `JITFunction.run` takes for a compiled kernel. Launches from several threads take turns."""

    def __init__(self, launch: PackedLaunch, cubin: bytes, cuda: LibCuda, max_shared: int) -> None:
        """Loads the cubin; DeviceError if the driver refuses it."""
        self.launch = launch
        self.function = cuda.load(cubin, launch.symbol, launch.shared, max_shared)
        self.packed_metadata = (launch.num_warps, 1, launch.shared)
        self._cuda = cuda
        self._arguments = Arguments(launch, cuda)
        self._attribute = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = LaunchConfig(shared_bytes=launch.shared, attributes=ctypes.pointer(self._attribute))
        self._config.block[:] = (32 * launch.num_warps, 1, 1)
        self._config.num_attributes = int(launch.launch_pdl)
        self._lock = threading.Lock()

    def launch_metadata(self, grid: Sequence[int], stream: int, *values: Any) -> None:
        """Nothing: only profilers' hooks, which are not called, would read it."""

    def run(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: c_void_p,
        packed_metadata: object,
        launch_metadata: object,
        enter_hook: object,
        exit_hook: object,
        *values: Any,
    ) -> None:
        """Starts the kernel on a stream; DeviceError if the driver refuses."""
        if x * y * z == 0:
            return
        config = self._config
        with self._lock:
            self._arguments.write(values)
            config.grid[:] = (x, y, z)
            config.stream = stream
            code = self._cuda.launch(byref(config), function, self._arguments.addresses, None)
            if code == INVALID_CONTEXT:
                self._cuda.bind_context()
                code = self._cuda.launch(byref(config), function, self._arguments.addresses, None)
        self._cuda.check(code, f"launch of {self.launch.kernel}")
