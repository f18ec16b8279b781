"""What the machine can do, measured here and now: the ceilings that figures are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPEATS = 7
_CPU_BYTES = 1 << 29
_GPU_BYTES = 1 << 32  # many times any L2 cache
_CPU_SIZE, _GPU_SIZE = 1536, 8192


@dataclass(frozen=True)
class Roofline:
    """Bytes a second that are read, that are read plus written by a copy, and operations a second
    of a square matrix product in ``dtype``."""

    read_rate: float
    copy_rate: float
    matmul_rate: float
    dtype: str

    @property
    def bandwidth(self) -> float:
        """The better of the two: what a kernel that only moves memory can reach."""
        return max(self.read_rate, self.copy_rate)

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time in which so much can be moved and computed."""
        return max(num_bytes / self.bandwidth, flops / self.matmul_rate)


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure a device. Call it before a model is loaded: it takes up to 8 GiB for a moment."""
    return Roofline(
        read_bandwidth(device),
        copy_bandwidth(device),
        matmul_rate(device, dtype),
        str(dtype).removeprefix("torch."),
    )


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes a second at which a sum reads memory: the median of several passes."""
    block = torch.ones(_num_bytes(device) // 4, device=device)
    return block.nbytes / median_seconds(block.sum, block.device)


def copy_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes a second, read plus written, of a copy: the median of several passes."""
    block = torch.ones(_num_bytes(device) // 4, device=device)
    target = torch.empty_like(block)
    return 2 * block.nbytes / median_seconds(lambda: target.copy_(block), block.device)


def matmul_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Operations a second of a square matrix product: the median of several."""
    size = _CPU_SIZE if torch.device(device).type == "cpu" else _GPU_SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), out.device)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, after one for warming up; on a GPU by its own clock."""
    call()
    once = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return statistics.median(once(call) for _ in range(_REPEATS))


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _num_bytes(device: torch.device | str) -> int:
    """Enough to be served by memory and not by a cache, as far as there is room for two."""
    if torch.device(device).type == "cpu":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_GPU_BYTES, free // 4)
