"""Blocks, by their literal ids."""

from __future__ import annotations

import pytest

from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvariantError


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.allocate("a", 5)
    blocks.allocate("b", 4)
    assert list(blocks.tables("a")[0]) == [1, 2]
    assert list(blocks.tables("b")[0]) == [3]
    assert blocks.num_free_blocks == 4
    blocks.check()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, [1]), (4, [1]), (5, [1, 2]), (8, [1, 2]), (9, [1, 2, 3])]
)
def test_a_table_grows_at_the_block_boundary(num_tokens: int, expected: list[int]) -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    for tokens in range(1, num_tokens + 1):
        blocks.allocate("a", tokens)
    assert list(blocks.tables("a")[0]) == expected
    blocks.check()


def test_freed_blocks_go_to_the_back_last_first() -> None:
    blocks = BlockManager(num_blocks=6, block_size=4)
    blocks.allocate("a", 12)
    blocks.free("a")
    assert list(blocks.pool._free) == [4, 5, 3, 2, 1]


def test_a_request_grows_into_the_next_block_while_that_is_free() -> None:
    blocks = BlockManager(num_blocks=9, block_size=4)
    blocks.allocate("a", 4, expected_tokens=12)
    blocks.allocate("b", 4, expected_tokens=8)  # leaves blocks 2 and 3 to a
    blocks.allocate("a", 12)
    assert list(blocks.tables("a")[0]) == [1, 2, 3]
    assert list(blocks.tables("b")[0]) == [4]
    blocks.allocate("c", 4)
    assert list(blocks.tables("c")[0]) == [6]
    blocks.allocate("b", 12)  # more than it expected: 6 is taken, 7 is free the longest
    assert list(blocks.tables("b")[0]) == [4, 5, 7]


def test_a_place_that_is_taken_falls_back_to_the_oldest_free_block() -> None:
    blocks = BlockManager(num_blocks=5, block_size=4)
    blocks.allocate("a", 4, expected_tokens=400)
    blocks.allocate("b", 4)  # the place after a lies beyond the pool, and the first block is a's
    assert list(blocks.tables("a")[0]) == [1]
    assert list(blocks.tables("b")[0]) == [2]
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
    before = blocks.tables("a")[0]
    blocks.allocate("a", 8)
    assert blocks.tables("a")[0] is before
    assert list(before) == [1, 2]
    blocks.free("a")
    blocks.allocate("a", 4)
    assert blocks.tables("a")[0] is not before


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        BlockManager(num_blocks, block_size)


def test_the_checker_sees_a_lost_block() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.pool._free.popitem()
    with pytest.raises(AssertionError, match="lost"):
        blocks.check()


def test_the_checker_sees_a_block_both_free_and_used() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.allocate("a", 4)
    blocks.pool._free[1] = None
    with pytest.raises(AssertionError, match="free and used"):
        blocks.check()


# With a prefix cache. Keys are opaque here: one letter a block.


def cached(num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=True)


def found(blocks: BlockManager, keys: list[bytes]) -> list[int]:
    """Blocks of the only group that may be shared."""
    return list(blocks.find_prefix(keys).tables[0])


def run(blocks: BlockManager, name: str, keys: str, num_tokens: int = 0) -> list[int]:
    """A request that shares what it can of ``keys`` and computes the rest: its blocks."""
    letters = [letter.encode() for letter in keys]
    prefix = blocks.find_prefix(letters)
    num_found = prefix.num_blocks
    num_tokens = num_tokens or len(letters) * blocks.block_size
    assert blocks.can_allocate(name, num_tokens, 0, prefix)
    blocks.allocate(name, num_tokens, prefix=prefix)
    assert blocks.publish(name, blocks.tables(name), num_found, letters[num_found:])
    blocks.check()
    return list(blocks.tables(name)[0])


def test_a_prefix_is_shared_by_two_that_run_and_kept_when_they_end() -> None:
    blocks = cached(9)
    assert run(blocks, "a", "xy", num_tokens=9) == [1, 2, 3]
    assert run(blocks, "b", "xy", num_tokens=10) == [1, 2, 4]
    assert blocks.num_free_blocks == 4
    blocks.free("a")
    assert blocks.num_free_blocks == 5  # 3 alone: b holds the others
    blocks.free("b")
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (8, 2)
    assert found(blocks, [b"x", b"y", b"z"]) == [1, 2]
    blocks.check()


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    blocks = cached(7)
    run(blocks, "a", "abc")
    run(blocks, "b", "xyz")
    blocks.free("a")
    blocks.free("b")
    assert run(blocks, "c", "abc") == [1, 2, 3]  # used again: x, y and z are the older ones now
    blocks.free("c")
    blocks.allocate("d", 8)
    assert list(blocks.tables("d")[0]) == [6, 5]
    assert found(blocks, [b"x", b"y", b"z"]) == [4]
    assert found(blocks, [b"a", b"b", b"c"]) == [1, 2, 3]
    blocks.check()


def test_what_is_not_cached_goes_first() -> None:
    blocks = cached(6)
    run(blocks, "a", "ab")
    blocks.allocate("b", 8)
    blocks.free("a")
    blocks.free("b")
    blocks.allocate("c", 12)
    assert found(blocks, [b"a", b"b"]) == [1, 2]
    blocks.allocate("d", 4)
    assert found(blocks, [b"a", b"b"]) == [1]
    blocks.check()


def test_a_wish_does_not_cost_a_block_that_was_used_lately() -> None:
    blocks = cached(9, 1)
    run(blocks, "old", "abcd")
    run(blocks, "new", "wxyz")
    blocks.free("old")  # 4, 3, 2, 1 are freed
    blocks.free("new")  # and 8, 7, 6, 5
    blocks.pool._next_start = 6
    blocks.allocate("e", 1)  # would like 6, whose y was used lately
    assert list(blocks.tables("e")[0]) == [4]
    blocks.pool._next_start = 2
    blocks.allocate("f", 2)  # 2 and 3 are of the older half, though not the oldest
    assert list(blocks.tables("f")[0]) == [2, 3]
    blocks.check()


def test_shared_blocks_that_are_free_count_as_taken() -> None:
    blocks = cached(4)
    run(blocks, "a", "ab")
    blocks.free("a")
    prefix = blocks.find_prefix([b"a", b"b"])
    assert blocks.num_taken("b", 12, prefix) == 3
    assert blocks.can_allocate("b", 12, 0, prefix)
    assert not blocks.can_allocate("b", 12, 1, prefix)
    run(blocks, "a", "ab")
    assert blocks.num_taken("b", 12, prefix) == 1
    assert not blocks.can_allocate("b", 13, 0, prefix)


def test_a_table_made_anew_publishes_nothing_of_the_old_one() -> None:
    blocks = cached(6)
    blocks.allocate("a", 8)
    before = blocks.tables("a")
    blocks.free("a")
    assert not blocks.publish("a", before, 0, [b"x"])
    blocks.allocate("a", 8)
    assert not blocks.publish("a", before, 0, [b"x"])
    assert found(blocks, [b"x"]) == []


def test_forgotten_blocks_are_found_no_more_and_stay_held() -> None:
    blocks = cached(6)
    run(blocks, "a", "ab")
    run(blocks, "b", "ac")
    blocks.forget("b")
    assert found(blocks, [b"a", b"b"]) == []
    blocks.check()
    blocks.free("a")
    blocks.free("b")
    blocks.check()
    assert blocks.num_free_blocks == 5


def test_a_reset_forgets_what_is_free_and_what_is_held() -> None:
    blocks = cached(6)
    run(blocks, "a", "ab")
    run(blocks, "b", "xy")
    blocks.free("a")
    blocks.reset_prefix_cache()
    blocks.check()
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (3, 0)
    assert found(blocks, [b"a"]) == found(blocks, [b"x"]) == []


def test_only_a_block_that_one_request_fills_may_be_written() -> None:
    blocks = cached(6)
    run(blocks, "a", "a", num_tokens=5)
    assert [blocks.is_writable(block_id) for block_id in blocks.tables("a")[0]] == [False, True]
    run(blocks, "b", "a", num_tokens=5)
    assert [blocks.is_writable(block_id) for block_id in blocks.tables("b")[0]] == [False, True]


def test_without_a_cache_nothing_is_found() -> None:
    blocks = BlockManager(6, 4)
    blocks.allocate("a", 4)
    assert not blocks.publish("a", blocks.tables("a"), 0, [b"a"])
    blocks.free("a")
    assert found(blocks, [b"a"]) == []
    blocks.check()


def test_the_checker_sees_a_cached_block_that_is_handed_out() -> None:
    blocks = cached(4)
    run(blocks, "a", "a")
    blocks.free("a")
    blocks.pool._free[1] = blocks.pool._cached.pop(1)  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="cached blocks differ"):
        blocks.check()


def test_the_checker_sees_a_promise_of_one_that_is_gone() -> None:
    blocks = cached(4)
    assert blocks.prefix_cache is not None
    blocks.prefix_cache.promise("ghost", [b"a"])
    with pytest.raises(InvariantError, match="promises blocks and holds none"):
        blocks.check()


# With two groups: one that keeps everything, and one with a window of 6 tokens.


def grouped(num_blocks: int) -> BlockManager:
    groups = (FULL, BlockGroup(window=6))
    return BlockManager(num_blocks, 4, groups=groups, enable_prefix_caching=True)


def tables(blocks: BlockManager, name: str) -> list[list[int]]:
    blocks.check()
    return [list(table) for table in blocks.tables(name)]


def grow(blocks: BlockManager, name: str, num_computed: int, until: int, total: int) -> None:
    """Make room for a step that ends before ``until``, of a request with ``total`` tokens."""
    if num_computed:
        blocks.drop_behind(name, num_computed, until, total)
    assert blocks.can_allocate(name, total, until=until)
    blocks.allocate(name, total, until=until)


def test_a_windowed_table_is_filled_a_step_at_a_time_and_emptied_behind() -> None:
    blocks = grouped(30)
    assert blocks.num_taken("a", 17, until=8) == 5 + 2
    grow(blocks, "a", 0, 8, 17)
    assert tables(blocks, "a") == [[1, 2, 3, 4, 5], [6, 7]]
    assert blocks.num_slots("a") == 8
    grow(blocks, "a", 8, 16, 17)  # token 8 sees 3 and later: all blocks
    assert tables(blocks, "a") == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    grow(blocks, "a", 16, 17, 17)  # token 16 sees 11 and later: 2 blocks are behind
    assert tables(blocks, "a") == [[1, 2, 3, 4, 5], [0, 0, 8, 9, 10]]
    assert blocks.pool.num_held == [5, 3]
    for length in range(18, 72):
        if length > blocks.num_slots("a"):
            grow(blocks, "a", length - 1, length, length)
            assert blocks.pool.num_held == [-(-length // 4), 3]
    blocks.free("a")
    assert blocks.num_free_blocks == 29
    blocks.check()


def test_nothing_is_given_back_that_a_step_in_flight_computes() -> None:
    blocks = grouped(20)
    blocks.allocate("a", 40, until=20)
    assert blocks.drop_behind("a", 20, 40, 1)
    assert tables(blocks, "a")[1][:2] == [0, 12]
    assert not blocks.drop_behind("a", 20, 40, 1)
    assert blocks.drop_behind("a", 20, 40, 40)
    assert tables(blocks, "a")[1] == [0, 0, 0, 14, 15]


def test_a_table_that_does_not_grow_keeps_what_it_has() -> None:
    blocks = grouped(20)
    blocks.allocate("a", 20)
    assert not blocks.drop_behind("a", 19, 20, 20)
    assert tables(blocks, "a")[1] == [6, 7, 8, 9, 10]


KEYS = [b"v", b"w", b"x", b"y", b"z"]


def test_a_hit_needs_of_a_window_what_the_next_token_sees() -> None:
    blocks = grouped(20)
    blocks.allocate("a", 20)
    blocks.publish("a", blocks.tables("a"), 0, KEYS)
    hit = blocks.find_prefix(KEYS)
    assert (hit.num_blocks, hit.tables) == (5, ((1, 2, 3, 4, 5), (0, 0, 0, 9, 10)))
    blocks.allocate("b", 21, prefix=hit)
    assert tables(blocks, "b") == [[1, 2, 3, 4, 5, 11], [0, 0, 0, 9, 10, 12]]
    assert blocks.pool.num_held == [6, 6]
    blocks.free("b")
    blocks.pool.forget(10)  # block 4 of the window: a hit ends before it
    assert blocks.find_prefix(KEYS).num_blocks == 4
    blocks.pool.forget(7)  # block 1, which the token after blocks 0 and 1 sees
    blocks.pool.forget(9)
    assert blocks.find_prefix(KEYS).tables == ((1,), (6,))


def test_what_a_spoiled_request_held_behind_its_window_is_forgotten_too() -> None:
    blocks = BlockManager(8, 4, groups=(BlockGroup(window=4),), enable_prefix_caching=True)
    blocks.allocate("a", 12)
    blocks.publish("a", blocks.tables("a"), 0, KEYS[:3])
    assert blocks.drop_behind("a", 12, 13, 99)
    assert (blocks.num_cached_blocks, blocks.find_prefix(KEYS[:1]).num_blocks) == (2, 1)
    blocks.forget("a", KEYS[:3])
    assert (blocks.num_cached_blocks, blocks.find_prefix(KEYS[:3]).num_blocks) == (0, 0)
    blocks.check()


@pytest.mark.parametrize(
    ("number", "place", "message"),
    [(0, 2, "null block where it reads"), (1, 4, "null block where it reads")],
)
def test_the_checker_sees_a_null_block_where_a_request_reads(
    number: int, place: int, message: str
) -> None:
    blocks = grouped(20)
    blocks.allocate("a", 20)
    blocks.tables("a")[number][place] = 0
    with pytest.raises(InvariantError, match=message):
        blocks.check()


def test_the_checker_sees_a_block_in_the_wrong_group() -> None:
    blocks = grouped(20)
    blocks.allocate("a", 4)
    full, windowed = blocks.tables("a")
    full[0], windowed[0] = windowed[0], full[0]
    with pytest.raises(InvariantError, match="in two groups"):
        blocks.check()
