"""Blocks, by their literal ids."""

from __future__ import annotations

import pytest

from octavo.runtime.block_manager import BlockManager


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.allocate("a", 5)
    blocks.allocate("b", 4)
    assert list(blocks.block_ids("a")) == [1, 2]
    assert list(blocks.block_ids("b")) == [3]
    assert blocks.num_free_blocks == 4
    blocks.check()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, [1]), (4, [1]), (5, [1, 2]), (8, [1, 2]), (9, [1, 2, 3])]
)
def test_a_table_grows_at_the_block_boundary(num_tokens: int, expected: list[int]) -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    for tokens in range(1, num_tokens + 1):
        blocks.allocate("a", tokens)
    assert list(blocks.block_ids("a")) == expected
    blocks.check()


def test_freed_blocks_go_to_the_back_last_first() -> None:
    blocks = BlockManager(num_blocks=6, block_size=4)
    blocks.allocate("a", 12)
    blocks.free("a")
    assert list(blocks._free) == [4, 5, 3, 2, 1]


def test_a_request_grows_into_the_next_block_while_that_is_free() -> None:
    blocks = BlockManager(num_blocks=9, block_size=4)
    blocks.allocate("a", 4, expected_tokens=12)
    blocks.allocate("b", 4, expected_tokens=8)  # leaves blocks 2 and 3 to a
    blocks.allocate("a", 12)
    assert list(blocks.block_ids("a")) == [1, 2, 3]
    assert list(blocks.block_ids("b")) == [4]
    blocks.allocate("c", 4)
    assert list(blocks.block_ids("c")) == [6]
    blocks.allocate("b", 12)  # more than it expected: 6 is taken, 7 is free the longest
    assert list(blocks.block_ids("b")) == [4, 5, 7]


def test_a_place_that_is_taken_falls_back_to_the_oldest_free_block() -> None:
    blocks = BlockManager(num_blocks=5, block_size=4)
    blocks.allocate("a", 4, expected_tokens=400)
    blocks.allocate("b", 4)  # the place after a lies beyond the pool, and the first block is a's
    assert list(blocks.block_ids("a")) == [1]
    assert list(blocks.block_ids("b")) == [2]
    blocks.check()


def test_asking_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    assert blocks.can_allocate("a", 12)
    assert not blocks.can_allocate("a", 13)
    assert not blocks.can_allocate("a", 12, keep_free=1)
    assert blocks.can_allocate("a", 8, keep_free=1)
    assert blocks.num_free_blocks == 3
    blocks.check()


def test_a_request_within_its_blocks_needs_none_even_below_the_watermark() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    blocks.allocate("a", 5)
    assert blocks.can_allocate("a", 8, keep_free=2)
    assert not blocks.can_allocate("a", 9)


def test_freeing_twice_or_a_stranger_frees_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.allocate("a", 4)
    blocks.free("a")
    blocks.free("a")
    blocks.free("b")
    assert blocks.num_free_blocks == 3
    blocks.check()


def test_a_table_grows_in_place_and_is_another_after_it_was_freed() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.allocate("a", 4)
    before = blocks.block_ids("a")
    blocks.allocate("a", 8)
    assert blocks.block_ids("a") is before
    assert list(before) == [1, 2]
    blocks.free("a")
    blocks.allocate("a", 4)
    assert blocks.block_ids("a") is not before


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        BlockManager(num_blocks, block_size)


def test_the_checker_sees_a_lost_block() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks._free.popitem()
    with pytest.raises(AssertionError, match="lost"):
        blocks.check()


def test_the_checker_sees_a_block_both_free_and_used() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.allocate("a", 4)
    blocks._free[1] = None
    with pytest.raises(AssertionError, match="free and used"):
        blocks.check()
