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

BF16, F32 = KVFormat(torch.bfloat16), KVFormat(torch.float32)
SLOTS = (KVSlot(3, 64, 64), KVSlot(2, 16, 8, window=32))


def test_bytes_of_a_block() -> None:
    # (3 * (64 + 64) + 2 * (16 + 8)) * 16 tokens, by hand
    assert block_bytes(SLOTS, BF16, 16) == 432 * 16 * 2
    assert block_bytes(SLOTS, F32, 16) == 432 * 16 * 4


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
        F32,
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
        F32,
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
            F32,
            block_size=16,
            wanted_tokens=1,
            available_bytes=2 * 27648 - 1,
        )


def test_caches_have_the_shapes_of_the_contract() -> None:
    plan = plan_kv_cache(SLOTS, BF16, block_size=8, wanted_tokens=40, available_bytes=GIB)
    caches = allocate_kv_caches(SLOTS, plan, BF16, torch.device("cpu"))
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


INT8 = KVFormat(torch.int8, has_token_scales=True)


def test_scales_of_tokens_are_tensors_of_their_own() -> None:
    # 432 codes a token; and each of 2 + 4 KV heads has a scale of 4 bytes for k and one for v.
    heads = sum(slot.num_kv_heads for slot in SLOTS)
    assert block_bytes(SLOTS, INT8, 16) == 16 * (432 + 2 * 4 * heads)
    plan = plan_kv_cache(SLOTS, INT8, block_size=8, wanted_tokens=40, available_bytes=GIB)
    caches = allocate_kv_caches(SLOTS, plan, INT8, torch.device("cpu"))
    for slot, (keys, values, *scales) in zip(SLOTS, caches, strict=True):
        assert keys.shape == (plan.num_blocks, 8, slot.num_kv_heads, slot.head_dim)
        assert values.shape == (plan.num_blocks, 8, slot.num_kv_heads, slot.v_head_dim)
        assert keys.dtype == values.dtype == torch.int8
        assert [tuple(s.shape) for s in scales] == [(plan.num_blocks, slot.num_kv_heads, 8)] * 2
        assert {s.dtype for s in scales} == {torch.float32}
    total = sum(cache.nbytes for slot in caches for cache in slot)
    assert total == plan.total_bytes


def test_a_block_of_llama_in_every_format() -> None:
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128; bytes a token."""
    slots = [KVSlot(8, 128, 128)] * 32
    fp8 = KVFormat(torch.float8_e4m3fn)
    assert [block_bytes(slots, held, 1) for held in (BF16, fp8, INT8)] == [131072, 65536, 67584]
