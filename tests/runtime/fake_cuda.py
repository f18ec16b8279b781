"""A libcuda that keeps what it is given, byte for byte, instead of having a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CONFIG_BYTES = 56
ATTRIBUTE_BYTES = 72


@dataclass(frozen=True)
class FakeLaunch:
    """A launch as the driver sees it: raw structures and raw parameters."""

    config: bytes
    attributes: tuple[bytes, ...]
    function: int
    parameters: tuple[bytes, ...]


class Function:
    """A C function: callable, and with the attribute that ctypes' users set."""

    argtypes: Any = None

    def __init__(self, body: Callable[..., int]) -> None:
        self._body = body

    def __call__(self, *args: Any) -> int:
        return self._body(*args)


@dataclass
class FakeCuda:
    """Every call succeeds, but those whose results are set in ``fails``, by function name."""

    num_parameters: int = 0
    fails: dict[str, list[int]] = field(default_factory=dict)
    images: list[bytes] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    launches: list[FakeLaunch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuGetErrorName = Function(self._get_error_name)
        self.cuModuleLoadData = Function(self._module_load)
        self.cuModuleGetFunction = Function(self._get_function)
        self.cuFuncSetAttribute = Function(self._set_attribute)
        self.cuLaunchKernelEx = Function(self._launch)

    def _result(self, name: str) -> int:
        results = self.fails.get(name)
        return results.pop(0) if results else 0

    def _get_error_name(self, result: int, text: Any) -> int:
        text._obj.value = f"CUDA_ERROR_{result}".encode()
        return 0

    def _module_load(self, module: Any, image: bytes) -> int:
        self.images.append(image)
        module._obj.value = 0x1000 + len(self.images)
        return self._result("cuModuleLoadData")

    def _get_function(self, function: Any, module: Any, name: bytes) -> int:
        self.entries.append(name)
        function._obj.value = module.value + 0x1000
        return self._result("cuModuleGetFunction")

    def _set_attribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return self._result("cuFuncSetAttribute")

    def _launch(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        assert extra is None
        raw = ctypes.string_at(config.value, CONFIG_BYTES)
        start, count = (int.from_bytes(raw[a:b], "little") for a, b in ((40, 48), (48, 52)))
        attributes = tuple(
            ctypes.string_at(start + i * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES) for i in range(count)
        )
        packed = tuple(ctypes.string_at(address, 8) for address in parameters)
        self.launches.append(FakeLaunch(raw, attributes, function.value, packed))
        return self._result("cuLaunchKernelEx")
