"""The blocks of the KV cache: who is free, who is used how often, and which comes next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from octavo.runtime.errors import require
from octavo.runtime.host_tier import HostTier
from octavo.runtime.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Blocks, counted by reference; each is used for one block group at a time.

    Blocks that nobody holds are free. Those that hold nothing known are handed out first, then
    cached ones, least recently used first. Sharing a cached block takes it out of that queue again.
    With a host tier (see octavo.runtime.host_tier) a cached block that is handed out is saved
    there.

    Nothing depends on where a block lies, but a kernel reads a request whose blocks lie in a row as
    one slice. So a request grows into the next block while that is free, and starts where the
    blocks that it may come to need are likely to be. Of the cached blocks it takes only such in
    this way as are in the older half of the queue, by the time they were freed.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        prefix_cache: PrefixCache | None,
        host_tier: HostTier | None,
    ) -> None:
        self.num_held = [0] * num_groups  # blocks in use, by their group
        self._num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._host_tier = host_tier
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))  # oldest first
        self._cached: OrderedDict[int, int] = OrderedDict()  # free as well: when each was freed
        self._num_freed = 0
        self._next_start = NULL_BLOCK + 1
        self._ref_counts = [0] * num_blocks
        self._group_of = [0] * num_blocks  # of what a block holds or held last

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content may be asked for again."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many tables a block is in."""
        return self._ref_counts[block_id]

    def take(self, group: int, before: int, extent: int) -> int:
        """A free block for a group, the one after ``before`` if it may be had; after the null block
        one where ``extent`` blocks in a row may come to lie."""
        wish = before + 1 if before != NULL_BLOCK else self._place(extent)
        block_id = self._take(wish)
        self._ref_counts[block_id] = 1
        self._group_of[block_id] = group
        self.num_held[group] += 1
        return block_id

    def share(self, block_id: int) -> None:
        """Count a block once more, that is used or cached."""
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
            self.num_held[self._group_of[block_id]] += 1
        self._ref_counts[block_id] += 1

    def give_back(self, block_id: int) -> None:
        """Count a block once less."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self.num_held[self._group_of[block_id]] -= 1
            if self._prefix_cache is not None and block_id in self._prefix_cache:
                self._num_freed += 1
                self._cached[block_id] = self._num_freed
            else:
                self._free[block_id] = None

    def forget(self, block_id: int) -> None:
        """Let nobody find what a block holds; who holds it keeps it."""
        if self._prefix_cache is not None:
            self._prefix_cache.drop(block_id)
        if self._cached.pop(block_id, None) is not None:
            self._free[block_id] = None

    def forget_all(self) -> None:
        """Forget what blocks hold; who holds them keeps them."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        self._free.update(dict.fromkeys(self._cached))
        self._cached.clear()

    def _place(self, extent: int) -> int:
        start = self._next_start
        if start + extent > self._num_blocks:
            start = NULL_BLOCK + 1
        self._next_start = start + extent
        return start

    def _take(self, wish: int) -> int:
        """The block that is wished for if it may be had, else the one that is next in turn."""
        if wish in self._free:
            del self._free[wish]
            return wish
        if self._free:
            return self._free.popitem(last=False)[0]
        oldest, freed = next(iter(self._cached.items()))
        is_old = 2 * self._cached.get(wish, self._num_freed + 1) <= freed + self._num_freed
        block_id = wish if is_old else oldest
        del self._cached[block_id]
        assert self._prefix_cache is not None
        key = self._prefix_cache.drop(block_id)
        if key is not None and self._host_tier is not None:
            self._host_tier.save(key, block_id)
        return block_id

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raise InvariantError when a block is lost, free and used, or miscounted; ``held`` are the
        blocks in the tables of each group, as often as they are there."""
        references = [0] * self._num_blocks
        for number, block_ids in enumerate(held):
            for block_id in block_ids:
                references[block_id] += 1
                require(self._group_of[block_id] == number, f"block {block_id} is in two groups")
            is_counted = len(set(block_ids)) == self.num_held[number]
            require(is_counted, f"blocks in use are miscounted for group {number}")
        require(references == self._ref_counts, "reference counts differ from the tables")
        require(self._free.keys().isdisjoint(self._cached), "a block is free twice")
        free = self._free.keys() | self._cached.keys()
        require(NULL_BLOCK not in free, "the null block is in a free queue")
        used = {block_id for block_id, count in enumerate(references) if count > 0}
        require(used.isdisjoint(free), f"free and used: {sorted(used.intersection(free))}")
        require(len(used) + len(free) == self._num_blocks - 1, "a block was lost")
        if self._prefix_cache is None:
            require(not self._cached, "there are cached blocks, and no prefix cache")
            return
        known = self._prefix_cache.block_ids
        require(known - used == self._cached.keys(), "cached blocks differ from free known ones")
        freed = list(self._cached.values())
        require(freed == sorted(freed), "cached blocks are not in the order they were freed in")
