"""The slots of host memory that evicted KV blocks go to, see octavo.runtime.host_tier.

A step copies a few blocks out of dozens of caches, each block in another place on either side. So
kernels gather them and scatter them, two launches a cache and direction, and read and write the
pinned slots themselves: a copy engine would take a copy for each block of each cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ir.manifest import KVSlot
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.kv_cache import (
    GIB,
    KVCachePlan,
    KVFormat,
    available_memory_bytes,
)
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.pinned import PinnedPages

# A step that decodes reads all weights, and computes as many tokens more in about the same time: a
# shorter run of blocks is not worth the launches of its copies.
MIN_LOAD_TOKENS = 64

_MOST_BLOCKS = 256  # at a time: what is staged on the device
_WIDEST_FIRST = (torch.int64, torch.int32, torch.int16, torch.uint8)


def plan_host_slots(options: LLMOptions, plan: KVCachePlan) -> int:
    """How many blocks ``kv_offload_gb`` of host memory hold; 0 without that option.

    Raises InvalidRequest without a prefix cache, CapacityError when it is too little or too much.
    """
    wanted = int(options.kv_offload_gb * GIB)
    if wanted == 0 or plan.block_bytes == 0:
        return 0
    if not options.enable_prefix_caching:
        raise InvalidRequest("kv_offload_gb needs the prefix cache; leave enable_prefix_caching on")
    if wanted < plan.block_bytes:
        raise CapacityError(
            f"kv_offload_gb={options.kv_offload_gb} does not hold a block of {plan.block_bytes} "
            "bytes; raise it, or set it to 0"
        )
    available = available_memory_bytes()
    if wanted > available:
        raise CapacityError(
            f"kv_offload_gb={options.kv_offload_gb}: {available / GIB:.2f} GiB of host memory are "
            "available; lower it"
        )
    return wanted // plan.block_bytes


def staging_bytes(slots: Sequence[KVSlot], kv_format: KVFormat, block_size: int) -> int:
    """What HostKVCache takes of the device's memory."""
    # Scales are narrower: one takes the bytes of four codes, and heads have more.
    widest = max((s.num_kv_heads * max(s.head_dim, s.v_head_dim) for s in slots), default=0)
    return _MOST_BLOCKS * widest * block_size * kv_format.dtype.itemsize


class HostKVCache:
    """``num_slots`` slots for blocks of ``kv_caches``, and the copies between them.

    Copies are launched on the current stream, and nothing waits for them.
    """

    def __init__(
        self, kv_caches: Sequence[tuple[Tensor, ...]], num_slots: int, device: torch.device
    ) -> None:
        """Raises CapacityError when the system does not give so much memory."""
        self._device = device
        # Caches of different block groups may be the same memory.
        distinct = {cache.data_ptr(): cache for slot in kv_caches for cache in slot}
        self._blocks = [_as_words(cache) for cache in distinct.values()]
        # Each part begins at a multiple of the widest word.
        sizes = [-(-num_slots * blocks[0].nbytes // 8) * 8 for blocks in self._blocks]
        self._pages = PinnedPages(sum(sizes), device)
        parts = torch.split(self._pages.device, sizes)
        self._slots = [
            part[: num_slots * blocks[0].nbytes].view(blocks.dtype).view(num_slots, -1)
            for part, blocks in zip(parts, self._blocks, strict=True)
        ]
        widest = max((blocks[0].nbytes for blocks in self._blocks), default=0)
        self._staging = torch.empty(_MOST_BLOCKS * widest, dtype=torch.uint8, device=device)

    def copy(self, saves: NDArray[np.int64] | None, loads: NDArray[np.int64] | None) -> None:
        """Copy blocks ``saves[0]`` to slots ``saves[1]``, then slots ``loads[0]`` to blocks
        ``loads[1]``. Goals of either are distinct."""
        self._copy(saves, self._blocks, self._slots)
        self._copy(loads, self._slots, self._blocks)

    def _copy(
        self, pairs: NDArray[np.int64] | None, sources: list[Tensor], goals: list[Tensor]
    ) -> None:
        if pairs is None:
            return
        indices = torch.from_numpy(pairs)
        if self._device.type == "cuda":
            indices = indices.pin_memory().to(self._device, non_blocking=True)
        for source_ids, goal_ids in (
            part.unbind() for part in torch.split(indices, _MOST_BLOCKS, dim=1)
        ):
            for source, goal in zip(sources, goals, strict=True):
                num_bytes = len(source_ids) * source[0].nbytes
                staged = self._staging[:num_bytes].view(source.dtype).view(len(source_ids), -1)
                torch.index_select(source, 0, source_ids, out=staged)
                goal.index_copy_(0, goal_ids, staged)


def _as_words(cache: Tensor) -> Tensor:
    """A cache as ``[num_blocks, words]``, in the widest words that a block is made of."""
    num_bytes = math.prod(cache.shape[1:]) * cache.dtype.itemsize
    dtype = next(dtype for dtype in _WIDEST_FIRST if num_bytes % dtype.itemsize == 0)
    return cache.view(cache.shape[0], -1).view(dtype)
