"""Which blocks of the KV cache belong to whom. Pure Python: it never sees a tensor."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from octavo.runtime.errors import require
from octavo.runtime.host_tier import HostTier
from octavo.runtime.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockManager:
    """Fixed-size blocks, reference-counted, handed out on demand.

    A request's block table grows with its context. With prefix caching, full blocks that are
    computed are known by a key (see octavo.runtime.prefix_cache) and may be in many tables. A block
    in a table is written at most until it is full and its key is published, so shared ones are
    never written and nothing is ever copied: a request that shares a prefix computes the partial
    block behind it anew, at most a block's tokens.

    Blocks that nobody holds are free. Those that hold nothing known are handed out first, then
    cached ones, least recently used first; a request's last block is freed first, so that tails go
    before heads. Sharing a cached block takes it out of that queue again. With a host tier (see
    octavo.runtime.host_tier) a cached block that is handed out is saved there, and what is found
    there is loaded into blocks that a request is handed out.

    Nothing depends on where a block lies, but a kernel reads a request whose blocks lie in a row as
    one slice. So a request grows into the next block while that is free, and starts where the
    blocks that it may come to need are likely to be. Of the cached blocks it takes only such in
    this way as are in the older half of the queue, by the time they were freed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        host_tier: HostTier | None = None,
    ) -> None:
        """``num_blocks`` counts the null block 0, which is never handed out."""
        assert host_tier is None or enable_prefix_caching, "a host tier goes by the cache's keys"
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens hold nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache() if enable_prefix_caching else None
        self.host_tier = host_tier
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))  # oldest first
        self._cached: OrderedDict[int, int] = OrderedDict()  # free as well: when each was freed
        self._num_freed = 0
        self._next_start = NULL_BLOCK + 1
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, array[int]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content may be asked for again."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks the request needs to hold ``num_tokens`` tokens in all."""
        missing = -(-num_tokens // self.block_size) - len(self._tables.get(request_id, ()))
        return missing if missing > 0 else 0

    def num_freed(self, request_ids: Iterable[str], besides: Collection[int] = ()) -> int:
        """How many blocks, ``besides`` these, would be free if the requests gave back all theirs.

        Those that they share among themselves count too.
        """
        held = Counter(b for request_id in request_ids for b in self._tables[request_id])
        return sum(n == self._ref_counts[b] and b not in besides for b, n in held.items())

    def find_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Computed blocks of the longest run of ``keys``, from the first on; none without cache."""
        return [] if self.prefix_cache is None else self.prefix_cache.find(keys)

    def num_taken(self, request_id: str, num_tokens: int, prefix: Sequence[int] = ()) -> int:
        """How many free blocks ``allocate`` with the same arguments would take."""
        missing = self.num_missing(request_id, num_tokens)
        if prefix:
            missing -= sum(self._ref_counts[block_id] > 0 for block_id in prefix)
        return missing

    def can_allocate(
        self, request_id: str, num_tokens: int, keep_free: int = 0, prefix: Sequence[int] = ()
    ) -> bool:
        """Whether ``allocate`` would succeed and leave ``keep_free`` blocks free."""
        taken = self.num_taken(request_id, num_tokens, prefix)
        return taken == 0 or taken + keep_free <= len(self._free) + len(self._cached)

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        expected_tokens: int = 0,
        prefix: Sequence[int] = (),
        host_keys: Sequence[bytes] = (),
    ) -> None:
        """Grow the request's table until it holds ``num_tokens`` tokens in all.

        ``expected_tokens`` is what it may come to hold. It reserves nothing: the next request to
        start leaves so much room if it can. ``prefix`` are blocks of ``find_prefix`` that a request
        without blocks shares, in the order of its context. The host tier has ``host_keys``: those
        are to be loaded into the blocks after them.
        """
        assert self.can_allocate(request_id, num_tokens, 0, prefix), "ask can_allocate first"
        table = self._tables.setdefault(request_id, array("i"))
        assert not ((prefix or host_keys) and table), "a prefix is where a request starts"
        if host_keys and self.host_tier is not None:
            # Before blocks are taken: what those held may be saved to any slot that is not held.
            self.host_tier.hold(request_id, host_keys)
        for block_id in prefix:
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] += 1
        table.extend(prefix)
        for _ in range(self.num_missing(request_id, num_tokens)):
            wish = table[-1] + 1 if table else self._place(max(num_tokens, expected_tokens))
            block_id = self._take(wish)
            self._ref_counts[block_id] = 1
            table.append(block_id)
        if host_keys and self.host_tier is not None:
            first = len(prefix)
            self.host_tier.place(request_id, table[first : first + len(host_keys)])

    def _place(self, expected_tokens: int) -> int:
        """Where a request that may grow to this many tokens would like to start."""
        start, extent = self._next_start, self.blocks_for(expected_tokens)
        if start + extent > self.num_blocks:
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
        assert self.prefix_cache is not None
        key = self.prefix_cache.drop(block_id)
        if key is not None and self.host_tier is not None:
            self.host_tier.save(key, block_id)
        return block_id

    def free(self, request_id: str) -> None:
        """Give back everything that the request holds; nothing when it holds nothing."""
        cache = self.prefix_cache
        if cache is not None:
            cache.withdraw(request_id)
        if self.host_tier is not None:
            self.host_tier.withdraw(request_id)
        for block_id in reversed(self._tables.pop(request_id, array("i"))):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if cache is not None and block_id in cache:
                    self._num_freed += 1
                    self._cached[block_id] = self._num_freed
                else:
                    self._free[block_id] = None

    def publish(
        self, request_id: str, block_ids: array[int], first: int, keys: Sequence[bytes]
    ) -> bool:
        """Let others share the request's blocks from the ``first`` on, whose content is ``keys``.

        They must be full and computed, in the table ``block_ids``. False, and nothing is done, when
        the request has another table by now.
        """
        if self.prefix_cache is None or self._tables.get(request_id) is not block_ids:
            return False
        for block_id, key in zip(block_ids[first:], keys, strict=False):
            self.prefix_cache.put(key, block_id)
        self.prefix_cache.settle(request_id, keys)
        return True

    def forget(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        """Let nobody else share what the request holds or has held, of which the full blocks have
        ``keys``: its content is not to be trusted."""
        if self.prefix_cache is not None:
            for block_id in (
                *self._tables.get(request_id, ()),
                *self.prefix_cache.known(keys),  # in nobody's table if it was preempted
            ):
                self.prefix_cache.drop(block_id)
                if self._cached.pop(block_id, None) is not None:
                    self._free[block_id] = None
        if self.host_tier is not None:
            self.host_tier.forget(keys)

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold; who holds them keeps them."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            if self.host_tier is not None:
                self.host_tier.clear()
            self._free.update(dict.fromkeys(self._cached))
            self._cached.clear()

    def block_ids(self, request_id: str) -> array[int]:
        """The request's blocks, int32, in the order of its context: to read, not to change.

        It grows at the end as the request does; another array is a table made anew.
        """
        return self._tables[request_id]

    def holders(self) -> frozenset[str]:
        """Requests that hold blocks."""
        return frozenset(request_id for request_id, table in self._tables.items() if table)

    def is_writable(self, block_id: int) -> bool:
        """Whether only one request holds the block, and nobody else may come to share it."""
        is_known = self.prefix_cache is not None and block_id in self.prefix_cache
        return self._ref_counts[block_id] == 1 and not is_known

    def check(self) -> None:
        """Raise InvariantError when a block is lost, free and used, or miscounted."""
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            require(len(set(table)) == len(table), f"{request_id} holds a block twice")
            for block_id in table:
                references[block_id] += 1
        require(references == self._ref_counts, "reference counts differ from the tables")
        require(references[NULL_BLOCK] == 0, "the null block was handed out")
        require(self._free.keys().isdisjoint(self._cached), "a block is free twice")
        free = self._free.keys() | self._cached.keys()
        require(NULL_BLOCK not in free, "the null block is in a free queue")
        used = {block_id for block_id, count in enumerate(references) if count > 0}
        require(used.isdisjoint(free), f"free and used: {sorted(used.intersection(free))}")
        require(len(used) + len(free) == self.num_usable_blocks, "a block was lost")
        self._check_cache(used)

    def _check_cache(self, used: set[int]) -> None:
        if self.prefix_cache is None:
            require(not self._cached, "there are cached blocks, and no prefix cache")
            return
        self.prefix_cache.check()
        known = self.prefix_cache.block_ids
        require(known - used == self._cached.keys(), "cached blocks differ from free known ones")
        freed = list(self._cached.values())
        require(freed == sorted(freed), "cached blocks are not in the order they were freed in")
        owners = self.prefix_cache.promisers
        require(owners <= self._tables.keys(), "a request promises blocks and holds none")
        if self.host_tier is not None:
            self.host_tier.check()
            for request_id in self.host_tier.loading:
                goals = {load.block_id for load in self.host_tier.due(request_id)}
                table = self._tables.get(request_id, ())
                require(goals <= set(table), f"{request_id} loads into blocks of others")
                unshared = all(self.is_writable(block_id) for block_id in goals)
                require(unshared, f"{request_id} loads into a block that is shared")
