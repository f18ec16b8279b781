"""Blocks that go to host memory and come back, byte for byte, whatever a block is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.ir.manifest import KVSlot
from octavo.runtime import host_kv_cache, pinned
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.host_kv_cache import HostKVCache, plan_host_slots, staging_bytes
from octavo.runtime.kv_cache import GIB, KVCachePlan, KVFormat
from octavo.runtime.llm_options import LLMOptions

CPU = torch.device("cpu")
PLAN = KVCachePlan(num_blocks=100, block_size=16, block_bytes=2**20)


def pairs(*each: tuple[int, int]) -> NDArray[np.int64]:
    return np.array(each, dtype=np.int64).T.copy()


@pytest.mark.parametrize("shape", [(16, 2, 64), (1, 1, 1), (3, 1, 5), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_come_back_as_they_were(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_kv_cache, "_MOST_BLOCKS", 2)
    caches = [
        (torch.randn(9, *shape).to(dtype), torch.randn(9, *shape[:2], shape[2] + 1).to(dtype))
        for _ in range(2)
    ]
    host = HostKVCache(caches, 5, CPU)
    flat = [cache for pair in caches for cache in pair]
    before = [cache.clone() for cache in flat]
    host.copy(pairs((3, 4), (8, 0), (1, 2)), None)
    for old, new in zip(before, flat, strict=True):
        assert torch.equal(old, new)
        new.zero_()
    # A slot is read after it was written in the same step.
    for new, old in zip(flat, before, strict=True):
        new[6] = old[6]
    host.copy(pairs((6, 1)), pairs((0, 2), (4, 5), (2, 7), (1, 1)))
    for old, new in zip(before, flat, strict=True):
        expected = torch.zeros_like(old)
        expected[[2, 5, 7, 1, 6]] = old[[8, 3, 1, 6, 6]]
        assert torch.equal(new, expected)


def test_slots_are_what_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LLMOptions(kv_offload_gb=0.01)
    assert plan_host_slots(options, PLAN) == 10
    assert plan_host_slots(LLMOptions(), PLAN) == 0
    with pytest.raises(InvalidRequest, match="kv_offload_gb needs the prefix cache"):
        plan_host_slots(replace(options, enable_prefix_caching=False), PLAN)
    with pytest.raises(CapacityError, match="does not hold a block of 1048576 bytes; raise it"):
        plan_host_slots(replace(options, kv_offload_gb=1e-4), PLAN)
    monkeypatch.setattr(host_kv_cache, "available_memory_bytes", lambda: 3 * GIB)
    with pytest.raises(CapacityError, match=r"kv_offload_gb=4: 3.00 GiB .* available; lower it"):
        plan_host_slots(replace(options, kv_offload_gb=4), PLAN)


def test_what_is_staged_is_256_blocks_of_the_widest_cache() -> None:
    slots = [KVSlot(2, 64, 64), KVSlot(4, 16, 48)]
    assert staging_bytes(slots, KVFormat(torch.bfloat16), 16) == 256 * 16 * 4 * 48 * 2


def test_memory_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: int) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", none_left)
    with pytest.raises(CapacityError, match=r"no 2.00 GiB .* Cannot allocate .* kv_offload_gb"):
        pinned.PinnedPages(2 * GIB, CPU)
