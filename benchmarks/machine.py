"""What the machine can do: the ceilings that figures are held against."""

from __future__ import annotations

import time

import torch


def read_bandwidth(num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes a second at which a sum reads memory, best of several passes over 512 MiB."""
    block = torch.ones(num_bytes // 4)
    best = min(_seconds(block.sum) for _ in range(repeats))
    return num_bytes / best


def matmul_rate(size: int = 1536, repeats: int = 5) -> float:
    """Float32 operations a second of a square matrix product, best of several."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(_seconds(lambda: a @ b) for _ in range(repeats))


def _seconds(call: object) -> float:
    assert callable(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
