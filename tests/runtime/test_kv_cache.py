"""How many blocks, from how many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.ir.manifest import KVSlot
from octavo.runtime.errors import CapacityError
from octavo.runtime.kv_cache import (
    GIB,
    KVFormat,
    allocate_kv_caches,
    available_memory_bytes,
    block_bytes,
    cpu_kv_cache_bytes,
    plan_kv_cache,
)

SLOTS = (KVSlot(3, 64, 64), KVSlot(2, 16, 8, window=32))


def test_bytes_of_a_block() -> None:
    # (3 * (64 + 64) + 2 * (16 + 8)) * 16 tokens, by hand
    assert block_bytes(SLOTS, KVFormat(torch.bfloat16), 16) == 432 * 16 * 2
    assert block_bytes(SLOTS, KVFormat(torch.float32), 16) == 432 * 16 * 4


@pytest.mark.parametrize(
    ("available", "wanted_tokens", "expected"),
    [
        (10 * 27648, 10000, 10),  # bounded by memory, the null block among them
        (10 * 27648 - 1, 10000, 9),
        (GIB, 100, 8),  # 7 blocks hold 100 tokens
        (2 * 27648, 1, 2),
    ],
)
def test_the_pool_fits_and_is_no_larger_than_wanted(
    available: int, wanted_tokens: int, expected: int
) -> None:
    plan = plan_kv_cache(
        SLOTS,
        torch.float32,
        block_size=16,
        wanted_tokens=wanted_tokens,
        available_bytes=available,
    )
    assert plan.num_blocks == expected
    assert plan.total_bytes <= available
    assert plan.num_tokens == (expected - 1) * 16


def test_a_number_of_blocks_is_of_usable_ones() -> None:
    plan = plan_kv_cache(
        SLOTS,
        KVFormat(torch.float32),
        block_size=16,
        wanted_tokens=1,
        available_bytes=0,
        num_blocks=5,
    )
    assert (plan.num_blocks, plan.num_tokens) == (6, 80)


def test_too_little_memory_says_so() -> None:
    with pytest.raises(CapacityError, match="raise kv_cache_memory_bytes"):
        plan_kv_cache(
            SLOTS,
            KVFormat(torch.float32),
            block_size=16,
            wanted_tokens=1,
            available_bytes=2 * 27648 - 1,
        )


def test_caches_have_the_shapes_of_the_contract() -> None:
    plan = plan_kv_cache(
        SLOTS, KVFormat(torch.bfloat16), block_size=8, wanted_tokens=40, available_bytes=GIB
    )
    caches = allocate_kv_caches(SLOTS, plan, KVFormat(torch.bfloat16), torch.device("cpu"))
    assert [(tuple(k.shape), tuple(v.shape)) for k, v in caches] == [
        ((6, 8, 3, 64), (6, 8, 3, 64)),
        ((6, 8, 2, 16), (6, 8, 2, 8)),
    ]
    assert all(not cache.any() for pair in caches for cache in pair)


def test_available_memory_is_read(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   2048 kB\n")
    assert available_memory_bytes(meminfo) == 2048 * 1024
    assert available_memory_bytes(tmp_path / "none") == 16 * GIB


def test_on_a_cpu_at_most_four_gib() -> None:
    assert 0 < cpu_kv_cache_bytes() <= 4 * GIB
