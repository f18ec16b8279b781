"""Where a GPU's memory will go, item by item, before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from octavo.runtime.errors import CapacityError
from octavo.runtime.kv_cache import GIB

# cuBLAS's workspace, kernels' code, and what the allocator rounds up.
RESERVE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU. ``kv_cache`` is what is allocated of it, at most ``kv_cache_room``.

    ``in_use`` was taken before by this process (the context) and others; ``left`` is what
    gpu_memory_utilization leaves to others. ``staging`` is for copies between the KV cache and host
    memory, of which ``pinned`` is none of the GPU's.
    """

    total: int
    in_use: int
    left: int
    weights: int
    program: int
    inputs: int
    graphs: int
    reserve: int = RESERVE_BYTES
    staging: int = 0
    kv_cache: int = 0
    pinned: int = 0

    @property
    def fixed(self) -> int:
        """What this process takes beside the KV cache."""
        return self.weights + self.program + self.inputs + self.graphs + self.staging + self.reserve

    @property
    def kv_cache_room(self) -> int:
        """What is left for the KV cache; negative when the rest does not fit."""
        return self.total - self.in_use - self.left - self.fixed

    @property
    def planned(self) -> int:
        """What this process is to take in all."""
        return self.fixed + self.kv_cache

    def __str__(self) -> str:
        offload = (("staging of KV blocks", self.staging), ("pinned host memory", self.pinned))
        rows = (
            ("GPU memory", self.total),
            ("in use already", self.in_use),
            ("left to others (gpu_memory_utilization)", self.left),
            ("weights", self.weights),
            ("program buffers", self.program),
            ("inputs", self.inputs),
            ("CUDA graphs (estimated)", self.graphs),
            ("reserve", self.reserve),
            ("KV cache", self.kv_cache),
            *(offload if self.pinned else ()),
        )
        return "\n".join(f"  {name:<40}{size / GIB:8.2f} GiB" for name, size in rows)


@dataclass(frozen=True)
class MemoryUse:
    """What was planned and, after the load, what was taken of it."""

    plan: MemoryPlan
    used: int

    def __str__(self) -> str:
        used, planned = self.used / GIB, self.plan.planned / GIB
        return f"GPU memory taken: {used:.2f} GiB of {planned:.2f} planned"


def plan_memory(
    free: int,
    total: int,
    utilization: float,
    *,
    weights: int,
    program: int,
    inputs: int,
    graphs: int,
    staging: int = 0,
) -> MemoryPlan:
    """The plan before the size of the KV cache is known."""
    return MemoryPlan(
        total=total,
        in_use=total - free,
        left=int((1.0 - utilization) * total),
        weights=weights,
        program=program,
        inputs=inputs,
        graphs=graphs,
        staging=staging,
    )


def does_not_fit(plan: MemoryPlan) -> CapacityError:
    """The error that shows the plan and says what to change."""
    return CapacityError(
        f"the model does not fit into the GPU's memory:\n{plan}\n"
        "end what else uses the GPU, raise gpu_memory_utilization, or lower "
        "max_num_batched_tokens, max_num_seqs or kv_cache_memory_bytes"
    )


@contextmanager
def fits_or_says_why(plan: MemoryPlan) -> Iterator[None]:
    """Turn the allocator's error into one that shows the plan."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise does_not_fit(plan) from error
