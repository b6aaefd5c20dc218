"""libcuda as far as packs use it: keeps what it is told, and reads a launch's parameters back from memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

MAP_MARK = b"tensor map "


@dataclass(frozen=True)
class LaunchSeen:
    """One launch as the driver gets it."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: list[tuple[int, int]]  # id, first word of the value
    addresses: list[int]
    memory: list[bytes]  # of each parameter: 8 bytes, or the 128 of a tensor map


@dataclass
class FakeCuda:
    """The functions by their names; `refused` makes the named one fail with a code, once each time it is listed."""

    refused: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[tuple[bytes, str]] = field(default_factory=list)
    attributes_set: list[tuple[int, int, int]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    launches: list[LaunchSeen] = field(default_factory=list)
    contexts_bound: list[int] = field(default_factory=list)

    def _code(self, name: str) -> int:
        if self.refused and self.refused[0][0] == name:
            return self.refused.pop(0)[1]
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.contexts_bound.append(context.value)
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = f"text of {code}".encode()
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:  # noqa: N802
        self.loaded.append((cubin, ""))
        module._obj.value = 1000 + len(self.loaded)
        return self._code("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.loaded[-1] = (self.loaded[-1][0], name.decode())
        function._obj.value = module.value + 5000
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:  # noqa: N802
        value._obj.value = 24
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.attributes_set.append((function.value, attribute, value))
        return 0

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, place: Any, dtype: int, rank: int, base: Any, dims: Any, strides: Any, box: Any, steps: Any, *rest: int
    ) -> int:
        code = self._code("cuTensorMapEncodeTiled")
        self.maps.append(
            {
                "dtype": dtype,
                "base": base.value or 0,
                "dims": list(dims),
                "strides": list(strides),
                "box": list(box),
                "steps": list(steps),
                "interleave, swizzle, promotion, fill": rest,
            }
        )
        ctypes.memmove(place, MAP_MARK + b"%d" % len(self.maps), len(MAP_MARK) + 1)
        return code

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: object) -> int:  # noqa: N802
        config = config._obj
        memory = []
        for address in parameters:
            is_map = address % 128 == 0 and ctypes.string_at(address, len(MAP_MARK)) == MAP_MARK
            memory.append(ctypes.string_at(address, 128 if is_map else 8))
        self.launches.append(
            LaunchSeen(
                function.value,
                tuple(config.grid),
                tuple(config.block),
                config.shared_bytes,
                config.stream or 0,
                [(config.attributes[i].id, config.attributes[i].value[0]) for i in range(config.num_attributes)],
                list(parameters),
                memory,
            )
        )
        return self._code("cuLaunchKernelEx")
