"""How much KV cache there is: planned in bytes, allocated in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.ir.manifest import KVSlot
from octavo.runtime.block_groups import places
from octavo.runtime.errors import CapacityError

GIB = 1024**3
CPU_DEFAULT_BYTES = 4 * GIB
CPU_DEFAULT_SHARE = 0.25
SCALE_DTYPE = torch.float32


# Keys and values of a slot, then their scales if tokens have any: see allocate_kv_caches.
KVCaches = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class KVFormat:
    """The dtype of what caches hold, and whether each token and KV head has a scale beside it."""

    dtype: torch.dtype
    has_token_scales: bool = False

    def token_bytes(self, slot: KVSlot) -> int:
        """Bytes of one token in a slot."""
        return self.code_bytes(slot) + self.scale_bytes(slot)

    def code_bytes(self, slot: KVSlot) -> int:
        """Bytes of a token's keys and values."""
        return slot.num_kv_heads * (slot.head_dim + slot.v_head_dim) * self.dtype.itemsize

    def scale_bytes(self, slot: KVSlot) -> int:
        """Bytes of the scales of a token's keys and values; 0 where tokens have none."""
        return 2 * slot.num_kv_heads * SCALE_DTYPE.itemsize if self.has_token_scales else 0


@dataclass(frozen=True)
class KVCachePlan:
    """``num_blocks`` blocks of ``block_size`` tokens, the null block among them."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def block_bytes(slots: Sequence[KVSlot], kv_format: KVFormat, block_size: int) -> int:
    """Bytes of one block over all of its places; slots of different groups share a place."""
    placed = list(zip(places(slots), slots, strict=True))
    shared = {place: kv_format.code_bytes(slot) for place, slot in placed}
    scales = {(place, slot.num_kv_heads): kv_format.scale_bytes(slot) for place, slot in placed}
    return block_size * (sum(shared.values()) + sum(scales.values()))


def plan_kv_cache(
    slots: Sequence[KVSlot],
    kv_format: KVFormat,
    *,
    block_size: int,
    wanted_tokens: int,
    available_bytes: int,
    num_blocks: int | None = None,
) -> KVCachePlan:
    """A pool for ``wanted_tokens`` tokens, less if ``available_bytes`` do not hold them.

    ``num_blocks`` sets the number of usable blocks instead. Raises CapacityError when not even
    one block fits.
    """
    each = block_bytes(slots, kv_format, block_size)
    if num_blocks is not None:
        return KVCachePlan(num_blocks + 1, block_size, each)
    fitting = available_bytes // each if each else wanted_tokens
    usable = min(fitting - 1, -(-wanted_tokens // block_size))
    if usable < 1:
        raise CapacityError(
            f"{available_bytes} bytes of KV cache do not hold two blocks of {each} bytes; "
            "raise kv_cache_memory_bytes or lower block_size"
        )
    return KVCachePlan(usable + 1, block_size, each)


def cpu_kv_cache_bytes() -> int:
    """Bytes to use on a CPU when none are named.

    A quarter of the memory that is available, at most 4 GiB, since the machine has other uses.
    """
    return min(CPU_DEFAULT_BYTES, int(available_memory_bytes() * CPU_DEFAULT_SHARE))


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable; where the system does not say, enough for the default to apply."""
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        return int(CPU_DEFAULT_BYTES / CPU_DEFAULT_SHARE)
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def allocate_kv_caches(
    slots: Sequence[KVSlot], plan: KVCachePlan, kv_format: KVFormat, device: torch.device
) -> KVCaches:
    """Key and value caches ``[num_blocks, block_size, kv_heads, head_dim]``, one pair a slot.

    Slots of one place, which are of different block groups, have the same memory: of each block
    only the group that holds it makes use.

    Where tokens have scales, two more tensors follow, ``f32[num_blocks, kv_heads, block_size]``: a
    kernel reads those of a head and a block in one piece, and whatever copies a block copies the
    same index of each tensor. Slots of one place share them if they have as many heads.

    Zeroed: a kernel may read past a sequence's end and weigh what it reads by zero, and zero times
    the NaN of a stale page is NaN.
    """

    def cache(dtype: torch.dtype, *shape: int) -> Tensor:
        shape = (plan.num_blocks, *shape)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # NumPy's zeros are fresh pages of the system: they take memory, and the second a gigabyte
        # that clearing them takes, only when they are first used. PyTorch clears them at once.
        content = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(content).view(dtype).reshape(shape)

    try:
        return _pooled(slots, plan.block_size, kv_format, cache)
    except torch.OutOfMemoryError:
        raise  # whoever planned the GPU's memory says more
    except (RuntimeError, MemoryError, ValueError) as error:  # the last: beyond any address
        raise CapacityError(
            f"no memory for {plan.total_bytes / GIB:.2f} GiB of KV cache; "
            "lower kv_cache_memory_bytes, or num_gpu_blocks_override if that was given"
        ) from error


def _pooled(
    slots: Sequence[KVSlot], block_size: int, kv_format: KVFormat, cache: Callable[..., Tensor]
) -> KVCaches:
    """The tensors of all slots; ``cache`` makes one of a dtype, and the shape of a block."""
    codes: dict[int, list[Tensor]] = {}
    scales: dict[tuple[int, int], list[Tensor]] = {}
    caches: KVCaches = []
    for place, slot in zip(places(slots), slots, strict=True):
        heads, dims = slot.num_kv_heads, (slot.head_dim, slot.v_head_dim)
        if place not in codes:
            codes[place] = [cache(kv_format.dtype, block_size, heads, dim) for dim in dims]
        if kv_format.has_token_scales and (place, heads) not in scales:
            scales[place, heads] = [cache(SCALE_DTYPE, heads, block_size) for _ in dims]
        keys, values = codes[place]
        shape = (len(keys), block_size, heads)
        pair = keys.view(*shape, slot.head_dim), values.view(*shape, slot.v_head_dim)
        caches.append((*pair, *scales.get((place, heads), ())))
    return caches
