"""Loads cubins and launches them through the CUDA driver: no compiler, no launcher stub in the way.

Structures and numbers are those of cuda.h (CUDA 12 and 13, 64-bit).
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.errors import EngineError
from octavo.runtime.kernel_binary import Binary
from octavo.runtime.kernel_signature import parse_signature

_INVALID_CONTEXT = 201
# INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION, INVALID_SOURCE
_REFUSALS = frozenset((200, 209, 218, 222, 300))
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_SLOT_BYTES = 8  # of each packed parameter
_THREADS_PER_WARP = 32


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``; its value is a union of 64 bytes, of which we use an int."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", ctypes.POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    )


class CudaError(EngineError):
    """A call that the driver did not carry out."""


class RefusedBinary(CudaError):
    """A cubin that this driver or device cannot load: made for another, or by a newer toolchain."""


class CudaDriver:
    """The few functions of libcuda that a launch needs."""

    def __init__(self, library: Any) -> None:
        self._get_error_name = library.cuGetErrorName
        self._get_error_name.argtypes = [c_int, ctypes.POINTER(c_char_p)]
        self._module_load = library.cuModuleLoadData
        self._module_load.argtypes = [ctypes.POINTER(c_void_p), c_char_p]
        self._get_function = library.cuModuleGetFunction
        self._get_function.argtypes = [ctypes.POINTER(c_void_p), c_void_p, c_char_p]
        self._set_attribute = library.cuFuncSetAttribute
        self._set_attribute.argtypes = [c_void_p, c_int, c_int]
        self.launch_kernel_ex = library.cuLaunchKernelEx
        self.launch_kernel_ex.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]

    @classmethod
    @cache
    def shared(cls) -> CudaDriver:
        """The driver of this machine. Raises CudaError when there is none."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise CudaError(f"the NVIDIA driver cannot be loaded: {error}") from None

    def load(self, binary: Binary) -> int:
        """The function of a cubin, in the current context, for as long as the process lives.

        Raises RefusedBinary for a cubin that does not fit, CudaError for all else.
        """
        name = f"{binary.info.module}.{binary.info.kernel}"
        module, function = c_void_p(), c_void_p()
        self.check(self._module_load(byref(module), binary.cubin), f"loading {name}")
        entry = binary.info.entry.encode()
        self.check(self._get_function(byref(function), module, entry), f"finding {name}")
        shared = binary.info.shared_bytes
        if shared > _SHARED_BYTES_WITHOUT_ASKING:
            result = self._set_attribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
            self.check(result, f"giving {name} {shared} bytes of shared memory")
        assert function.value is not None
        return function.value

    def check(self, result: int, doing: str) -> None:
        """Raise for a result that is an error."""
        if not result:
            return
        text = c_char_p()
        self._get_error_name(result, byref(text))
        name = text.value.decode() if text.value else f"error {result}"
        kind = RefusedBinary if result in _REFUSALS else CudaError
        raise kind(f"{doing} failed: {name}")


def make_context_current(device_index: int) -> None:
    """Let this thread call the driver: any call of the CUDA runtime with the device will do."""
    torch.cuda.mem_get_info(device_index)


class Launcher:
    """A loaded kernel: packs parameters and launches on PyTorch's current stream.

    ``uses_pdl``: the kernel may start while the one before it ends. ``stream_of`` gives the stream
    for the device's index and ``allocate`` global scratch memory of so many bytes; both are
    PyTorch's if left out.
    """

    def __init__(
        self,
        driver: CudaDriver,
        binary: Binary,
        device_index: int,
        *,
        uses_pdl: bool,
        stream_of: Callable[[int], int] | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        info = binary.info
        self._driver = driver
        self._name = f"{info.module}.{info.kernel}"
        self._device_index = device_index
        self._grid: tuple[int, ...] = ()
        self._stream_of = stream_of or torch._C._cuda_getCurrentRawStream
        self._allocate = allocate or self._empty
        self._scratch_bytes = info.global_scratch_bytes
        self._scratch: dict[tuple[int, ...], Tensor] = {}
        self._no_scratch = (0,) * info.num_scratch_parameters
        packing = "".join(parameter.packing for parameter in parse_signature(info.signature))
        packer = struct.Struct(f"<{packing}{'Q' * info.num_scratch_parameters}")
        self._pack_into = packer.pack_into
        self._buffer = ctypes.create_string_buffer(max(packer.size, 1))
        start = ctypes.addressof(self._buffer)
        addresses = range(start, start + packer.size, _SLOT_BYTES)
        self._parameters = (c_void_p * len(addresses))(*addresses)
        self._attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = LaunchConfig(
            blockDimX=_THREADS_PER_WARP * info.num_warps,
            blockDimY=1,
            blockDimZ=1,
            sharedMemBytes=info.shared_bytes,
            attrs=ctypes.pointer(self._attribute) if uses_pdl else None,
            numAttrs=int(uses_pdl),
        )
        self._launch = driver.launch_kernel_ex
        self._arguments = (
            c_void_p(ctypes.addressof(self._config)),
            c_void_p(driver.load(binary)),
            self._parameters,
            None,
        )
        self._lock = threading.Lock()

    def __call__(self, grid: tuple[int, ...], values: list[Any]) -> None:
        """Launch; ``values`` are addresses and numbers in the order of the signature."""
        if 0 in grid:
            return
        scratch = self._scratch_for(grid) if self._scratch_bytes else self._no_scratch
        config = self._config
        # Two engines of one artifact share its kernels, and with them this buffer.
        with self._lock:
            self._pack_into(self._buffer, 0, *values, *scratch)
            if grid != self._grid:
                config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
                self._grid = grid
            config.hStream = self._stream_of(self._device_index)
            result = self._launch(*self._arguments)
            if result == _INVALID_CONTEXT:  # a thread's first call: make the context current
                make_context_current(self._device_index)
                result = self._launch(*self._arguments)
        if result:
            self._driver.check(result, f"launching {self._name} with grid {grid}")

    def _scratch_for(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Global scratch for all programs of a grid, made once, and no profile scratch.

        Kept for good: CUDA graphs hold its address.
        """
        if grid not in self._scratch:
            self._scratch[grid] = self._allocate(self._scratch_bytes * math.prod(grid))
        return (self._scratch[grid].data_ptr(), *self._no_scratch[1:])

    def _empty(self, num_bytes: int) -> Tensor:
        # PyTorch aligns to 512 bytes; Triton asks for 128.
        device = torch.device("cuda", self._device_index)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
