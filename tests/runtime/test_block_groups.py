"""How much of the context a group keeps, and what that costs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from octavo.ir.manifest import KVSlot
from octavo.runtime.block_groups import (
    FULL,
    BlockGroup,
    block_groups,
    longest_sequence,
    most_blocks,
    places,
)
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kv_cache import (
    GIB,
    KVCachePlan,
    KVFormat,
    allocate_kv_caches,
    block_bytes,
)
from octavo.runtime.prefix_hit import hit_length

F32 = KVFormat(torch.float32)


@pytest.mark.parametrize(
    ("group", "position", "first"),
    [
        (FULL, 100, 0),
        (BlockGroup(window=8), 0, 0),
        (BlockGroup(window=8), 7, 0),
        (BlockGroup(window=8), 8, 1),
        (BlockGroup(window=1), 5, 5),
        (BlockGroup(chunk=8), 7, 0),
        (BlockGroup(chunk=8), 8, 8),
        (BlockGroup(chunk=8), 15, 8),
        (BlockGroup(window=3, chunk=8), 15, 13),
    ],
)
def test_the_oldest_token_that_is_seen(group: BlockGroup, position: int, first: int) -> None:
    assert group.first_needed(position) == first


def held(group: BlockGroup, length: int, step: int, size: int) -> int:
    """The most blocks that chunks of at most ``step`` tokens hold, chunk by chunk."""
    return max(
        -(-min(start + step, length) // size) - group.first_needed(start) // size
        for start in range(length)
    )


def test_no_order_of_chunks_holds_more_than_is_planned() -> None:
    rng = random.Random(0)
    for _ in range(500):
        window, chunk = rng.choice([(rng.randint(1, 40), None), (None, rng.randint(1, 40))])
        group, size = BlockGroup(window, chunk), rng.choice([1, 2, 4, 16])
        length, step = rng.randint(1, 200), rng.randint(1, 50)
        most = group.most_blocks(length, step, size)
        assert held(group, length, step, size) <= most <= -(-length // size)


def test_what_is_planned_comes_to_pass() -> None:
    group = BlockGroup(window=8)
    assert group.most_blocks(1000, 16, 4) == held(group, 1000, 16, 4) == 7
    assert group.most_blocks(1000, 1, 4) == held(group, 1000, 1, 4) == 3
    assert FULL.most_blocks(1000, 16, 4) == 250


def test_the_longest_sequence_is_the_longest_that_fits() -> None:
    assert longest_sequence([FULL], 10, 16, 4, 1000) == 40
    assert longest_sequence([FULL], 10, 16, 4, 33) == 33
    assert longest_sequence([BlockGroup(window=8)], 7, 16, 4, 1000) == 1000
    groups = [FULL, BlockGroup(window=8)]
    assert longest_sequence(groups, 10, 16, 4, 1000) == 20  # both hold 5 blocks
    assert longest_sequence(groups, 20, 16, 4, 1000) == 52  # 13 blocks, and the window's 7


def slot(group: int, window: int | None, heads: int = 2, dim: int = 4) -> KVSlot:
    return KVSlot(heads, dim, dim, window, group=group)


def test_slots_of_all_groups_lie_in_the_same_places() -> None:
    slots = [slot(1, 8), slot(0, None), slot(1, 8), slot(0, None), slot(2, 8, 1, 8)]
    assert block_groups(slots) == (FULL, BlockGroup(8), BlockGroup(8))
    assert places(slots) == [0, 0, 1, 1, 0]
    assert block_bytes(slots, F32, 16) == 2 * 16 * (8 + 8) * 4
    plan = KVCachePlan(5, 16, block_bytes(slots, F32, 16))
    caches = allocate_kv_caches(slots, plan, F32, torch.device("cpu"))
    assert [tuple(keys.shape) for keys, _ in caches] == [(5, 16, 2, 4)] * 4 + [(5, 16, 1, 8)]
    memory = {cache.data_ptr(): cache.nbytes for pair in caches for cache in pair}
    assert sum(memory.values()) == plan.total_bytes
    caches[0][0][3, 7] = 1.0
    assert caches[4][0][3, 7].flatten().tolist() == [1.0] * 8
    assert not caches[2][0].any()


def test_scales_of_tokens_are_shared_by_slots_of_as_many_heads() -> None:
    slots = [slot(0, None), slot(1, 8), slot(2, 8, 1, 8)]
    codes, scales = 16 * (8 + 8), 4 * 16 * (2 + 2) + 4 * 16 * (1 + 1)
    kv_format = KVFormat(torch.int8, has_token_scales=True)
    assert block_bytes(slots, kv_format, 16) == codes + scales
    plan = KVCachePlan(5, 16, codes + scales)
    caches = allocate_kv_caches(slots, plan, kv_format, torch.device("cpu"))
    shapes = [tuple(part.shape) for part in caches[0]]
    assert shapes == [(5, 16, 2, 4)] * 2 + [(5, 2, 16)] * 2
    assert [tuple(part.shape) for part in caches[2]] == [(5, 16, 1, 8)] * 2 + [(5, 1, 16)] * 2
    memory = {part.data_ptr(): part.nbytes for parts in caches for part in parts}
    assert sum(memory.values()) == plan.total_bytes
    assert [part.data_ptr() for part in caches[0]] == [part.data_ptr() for part in caches[1]]
    # A block belongs to one group, so what another's scales say of it is nobody's.
    caches[2][2][3] = 1.0
    assert not caches[0][2].any()


def test_a_group_with_a_slot_that_sees_everything_keeps_everything() -> None:
    """As in artifacts that were compiled before there were groups."""
    assert block_groups([slot(0, 8), slot(0, None)]) == (FULL,)
    assert block_groups([slot(0, 8), slot(0, 9)]) == (BlockGroup(window=9),)
    assert block_groups([]) == (FULL,)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([slot(0, None), slot(2, 8)], "leave a block group out"),
        ([slot(0, None), slot(1, 8, heads=1)], "different sizes share a block"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(slots: list[KVSlot], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        block_groups(slots)


def is_hit(
    groups: Sequence[BlockGroup], length: int, size: int, there: set[tuple[int, int]]
) -> bool:
    """Whether every group has the blocks that the token after ``length`` blocks sees."""
    return all(
        (number, index) in there
        for number, group in enumerate(groups)
        for index in range(group.first_needed(length * size) // size, length)
    )


def test_the_longest_hit_is_found() -> None:
    """Against trying every length, on what random orders of eviction leave."""
    rng = random.Random(0)
    for _ in range(2000):
        groups = rng.choice([(FULL,), (FULL, BlockGroup(5)), (BlockGroup(3), BlockGroup(chunk=6))])
        size, num = rng.choice([1, 2, 4]), rng.randint(0, 12)
        there = {(g, i) for g in range(len(groups)) for i in range(num) if rng.random() < 0.8}
        longest = max(n for n in range(num + 1) if is_hit(groups, n, size, there))
        found = hit_length(groups, num, size, lambda g, i, there=there: (g, i) in there)
        assert found == longest


def test_the_bytes_of_gemma_3_27b() -> None:
    """The figures of docs/scheduling.md."""
    windows = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    local = iter([1 + i // 10 for i in range(52)])
    grouped = [KVSlot(16, 128, 128, w, group=0 if w is None else next(local)) for w in windows]
    alone = [KVSlot(16, 128, 128, w) for w in windows]

    def gib(slots: list[KVSlot], tokens: int, step: int) -> float:
        blocks = most_blocks(block_groups(slots), tokens, step, 16)
        return round(blocks * block_bytes(slots, KVFormat(torch.bfloat16), 16) / GIB, 1)

    assert [gib(alone, tokens, 8192) for tokens in (1024, 8192, 131072)] == [0.5, 3.9, 62.0]
    assert [gib(grouped, tokens, 8192) for tokens in (1024, 8192, 131072)] == [0.5, 4.4, 14.2]
    assert [gib(grouped, tokens, 1) for tokens in (1024, 8192, 131072)] == [0.5, 1.1, 10.5]
