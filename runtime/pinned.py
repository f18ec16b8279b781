"""Host memory that kernels read and write themselves, over PCIe.

A copy engine takes 5 to 10 us to start and as long to hand over to the next kernel, and a CUDA
graph behind it is launched late. A kernel that moves a few KB has neither cost: on an H200 it saves
13 us a step (docs/perf-log.md).
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.errors import CapacityError


class PinnedBuffer:
    """Pinned memory of ``num_bytes``, a multiple of 4, seen from both sides.

    ``host`` is a CPU tensor, u8; ``device`` the same memory as a CUDA tensor, i32. Without a GPU
    both are one CPU tensor.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        words = self.host.view(torch.int32)
        self.device = torch.as_tensor(_OnDevice(words), device=device) if is_cuda else words

    def put_into(self, goal: Tensor, num_bytes: int) -> None:
        """Copy the first ``num_bytes`` into device memory, u8, by a kernel on this stream."""
        copy_by_kernel(self.device[: num_bytes // 4], goal[:num_bytes].view(torch.int32))

    def take_from(self, source: Tensor) -> Tensor:
        """Copy device memory to the start, likewise: the host's view of it, in its dtype."""
        words = source.view(torch.int32)
        copy_by_kernel(words, self.device[: words.numel()])
        return self.host[: source.nbytes].view(source.dtype)


_PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister


class PinnedPages:
    """Gigabytes of pinned memory; PyTorch's allocator would take the next power of two of them.

    ``device`` is u8, a multiple of 8 bytes: a CUDA tensor, or without a GPU a CPU tensor.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises CapacityError when the system does not give or pin so much."""
        size = max(8, -(-num_bytes // 8) * 8)
        try:
            # Whole pages, nobody else's: a page is pinned once. Zeroed when they are first used.
            host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            raise _no_pages(size, str(error)) from error
        self.device = host
        if device.type == "cuda":
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(runtime.cudaHostRegister(host.data_ptr(), size, _PORTABLE_AND_MAPPED))
            if status != 0:
                raise _no_pages(size, f"cudaHostRegister gave error {status}")
            weakref.finalize(self, _unregister, host).atexit = False
            words = torch.as_tensor(_OnDevice(host.view(torch.int32)), device=device)
            self.device = words.view(torch.uint8)


def _unregister(host: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]


def _no_pages(size: int, reason: str) -> CapacityError:
    return CapacityError(
        f"no {size / 2**30:.2f} GiB of host memory for evicted KV blocks: {reason}; "
        "lower kv_offload_gb"
    )


def copy_by_kernel(source: Tensor, goal: Tensor) -> None:
    """``i32[N]`` to ``i32[N]``. ``copy_`` would use a copy engine."""
    torch.add(source, 0, out=goal)


class _OnDevice:
    """Pinned memory as CUDA code finds it: one address for host and device."""

    def __init__(self, words: Tensor) -> None:
        self._words = words  # kept alive by the tensor that is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (words.numel(),),
            "typestr": "<i4",
            "data": (words.data_ptr(), False),
            "version": 3,
        }
