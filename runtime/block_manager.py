"""Which blocks of the KV cache belong to whom. Pure Python: it never sees a tensor."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeAlias

from octavo.runtime.block_groups import FULL, BlockGroup, most_blocks
from octavo.runtime.block_pool import NULL_BLOCK, BlockPool
from octavo.runtime.errors import require
from octavo.runtime.host_tier import HostTier
from octavo.runtime.prefix_cache import PrefixCache
from octavo.runtime.prefix_hit import HostBlock, IsThere, PrefixHit, group_key, hit_length

# A request's block ids, int32, for each block group, in the order of its context.
BlockTable: TypeAlias = "array[int]"
Tables: TypeAlias = "tuple[BlockTable, ...]"


class BlockManager:
    """Fixed-size blocks, reference-counted, handed out on demand.

    A request has a block table for each block group, which grows with its context. The groups take
    their blocks from one pool. Where a group keeps a window of the context, blocks behind it are
    given back, and the null block stands in their place; its table holds what is computed and what
    the next step computes, the others' hold all tokens that are known.

    With prefix caching, full blocks that are computed are known by a key (see
    octavo.runtime.prefix_cache) and may be in many tables. A block in a table is written at most
    until it is full and its key is published, so shared ones are never written and nothing is ever
    copied: a request that shares a prefix computes the partial block behind it anew, at most a
    block's tokens.

    A request's last block is freed first, so that tails are handed out before heads, see
    octavo.runtime.block_pool. What a host tier (see octavo.runtime.host_tier) has saved of blocks
    that were handed out again is loaded into blocks of the request that finds it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[BlockGroup] = (FULL,),
        enable_prefix_caching: bool = False,
        host_tier: HostTier | None = None,
    ) -> None:
        """``num_blocks`` counts the null block 0, which is never handed out."""
        assert host_tier is None or enable_prefix_caching, "a host tier goes by the cache's keys"
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens hold nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups)
        self._windowed = [i for i, group in enumerate(self.groups) if not group.is_full]
        self.prefix_cache = PrefixCache() if enable_prefix_caching else None
        self.host_tier = host_tier
        self.pool = BlockPool(num_blocks, len(self.groups), self.prefix_cache, host_tier)
        self._tables: dict[str, Tables] = {}
        self._nothing: Tables = tuple(array("i") for _ in self.groups)  # to read, not to change
        self._no_hit = PrefixHit(0, tuple(() for _ in self.groups))

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content may be asked for again."""
        return self.pool.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks of one group hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a request holds at once until it has ``num_tokens`` tokens, of which
        a step computes up to ``step_tokens``."""
        return most_blocks(self.groups, num_tokens, step_tokens, self.block_size)

    def num_slots(self, request_id: str) -> int:
        """How many tokens have room in the blocks of every group."""
        return min(map(len, self._tables[request_id])) * self.block_size

    def num_unused_slots(self, request_id: str, num_tokens: int) -> int:
        """Slots of a request's blocks, of all groups, that are past its first ``num_tokens``."""
        tables = self._tables.get(request_id, ())
        return sum(max(0, len(table) * self.block_size - num_tokens) for table in tables)

    def num_freed(self, request_ids: Iterable[str], besides: Collection[int] = ()) -> int:
        """How many blocks, ``besides`` these, would be free if the requests gave back all theirs.

        Those that they share among themselves count too.
        """
        held = Counter(b for request_id in request_ids for b in _held(self._tables[request_id]))
        count = self.pool.ref_count
        return sum(n == count(b) and b not in besides for b, n in held.items())

    def find_prefix(self, keys: Sequence[bytes]) -> PrefixHit:
        """As much as need not be computed of the context that ``keys`` stand for, of what blocks
        hold; nothing without cache."""
        cache = self.prefix_cache
        if cache is None:
            return self._no_hit
        return self._hit(keys, lambda group, i: cache.find(group_key(keys[i], group)) is not None)

    def find_on_host(self, keys: Sequence[bytes], hit: PrefixHit) -> PrefixHit:
        """As ``find_prefix``, of what blocks or host memory hold, if that is enough more than
        ``hit`` to be worth the loads; else ``hit``."""
        cache, tier = self.prefix_cache, self.host_tier
        if cache is None or tier is None:
            return hit

        def is_there(group: int, index: int) -> bool:
            key = group_key(keys[index], group)
            return cache.find(key) is not None or tier.find(key) is not None

        longer = self._hit(keys, is_there)
        gain = (longer.num_blocks - hit.num_blocks) * self.block_size
        return longer if gain >= max(tier.min_load_tokens, 1) else hit

    def _hit(self, keys: Sequence[bytes], is_there: IsThere) -> PrefixHit:
        assert self.prefix_cache is not None, "whoever asks has looked"
        length = hit_length(self.groups, len(keys), self.block_size, is_there)
        tables, loads = [], []
        for number, group in enumerate(self.groups):
            first = group.first_needed(length * self.block_size) // self.block_size
            table = [NULL_BLOCK] * length
            for index in range(first, length):
                key = group_key(keys[index], number)
                block_id = self.prefix_cache.find(key)
                if block_id is None:
                    loads.append(HostBlock(number, index, key))
                else:
                    table[index] = block_id
            tables.append(tuple(table))
        return PrefixHit(length, tuple(tables), tuple(loads))

    def num_taken(
        self,
        request_id: str,
        num_tokens: int,
        prefix: PrefixHit | None = None,
        until: int | None = None,
    ) -> int:
        """How many free blocks ``allocate`` with the same arguments would take."""
        tables = self._tables.get(request_id, self._nothing)
        prefix = prefix or self._no_hit
        taken = len(prefix.loads)
        for group, table, shared in zip(self.groups, tables, prefix.tables, strict=True):
            missing = self._wanted(group, num_tokens, until) - len(table) - len(shared)
            taken += missing if missing > 0 else 0
            for block_id in shared:
                taken += block_id != NULL_BLOCK and self.pool.ref_count(block_id) == 0
        return taken

    def _wanted(self, group: BlockGroup, num_tokens: int, until: int | None) -> int:
        """How long a group's table has to be."""
        end = num_tokens if until is None or group.is_full else until
        return -(-end // self.block_size)

    def can_allocate(
        self,
        request_id: str,
        num_tokens: int,
        keep_free: int = 0,
        prefix: PrefixHit | None = None,
        until: int | None = None,
    ) -> bool:
        """Whether ``allocate`` would succeed and leave ``keep_free`` blocks free."""
        taken = self.num_taken(request_id, num_tokens, prefix, until)
        return taken == 0 or taken + keep_free <= self.pool.num_free

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        expected_tokens: int = 0,
        prefix: PrefixHit | None = None,
        until: int | None = None,
    ) -> None:
        """Grow the request's tables until they hold ``num_tokens`` tokens in all, those of groups
        with a window until they hold the tokens before ``until``, where the next step ends.

        ``expected_tokens`` is what it may come to hold. It reserves nothing: the next request to
        start leaves so much room if it can. ``prefix`` is what a request without blocks shares and
        what is to be loaded for it.
        """
        assert self.can_allocate(request_id, num_tokens, 0, prefix, until), "ask can_allocate first"
        tables = self._tables.get(request_id)
        if tables is None:
            tables = self._tables[request_id] = tuple(array("i") for _ in self.groups)
        loads = prefix.loads if prefix is not None else ()
        if prefix is not None:
            assert not any(tables), "a prefix is where a request starts"
            self._share(request_id, tables, prefix)
        extent = self.blocks_for(max(num_tokens, expected_tokens))
        for number, index, _ in loads:
            table = tables[number]
            before = table[index - 1] if index else NULL_BLOCK
            table[index] = self.pool.take(number, before, extent)
        for number, table in enumerate(tables):
            for _ in range(self._wanted(self.groups[number], num_tokens, until) - len(table)):
                before = table[-1] if table else NULL_BLOCK
                table.append(self.pool.take(number, before, extent))
        if loads and self.host_tier is not None:
            goals = (tables[load.group][load.place] for load in loads)
            self.host_tier.place(request_id, goals)

    def _share(self, request_id: str, tables: Tables, prefix: PrefixHit) -> None:
        if prefix.loads and self.host_tier is not None:
            # Before blocks are taken: what those held may be saved to any slot that is not held.
            self.host_tier.hold(request_id, [load.key for load in prefix.loads])
        for table, shared in zip(tables, prefix.tables, strict=True):
            table.extend(shared)
            for block_id in shared:
                if block_id != NULL_BLOCK:
                    self.pool.share(block_id)

    def drop_behind(self, request_id: str, num_computed: int, until: int, keep_from: int) -> bool:
        """Give back blocks that no token after the first ``num_computed`` sees, but none from
        number ``keep_from`` on; says whether there were any.

        Only of tables that are about to grow: whoever copies tables need not look at the others.
        """
        is_any = False
        for number in self._windowed:
            group, table = self.groups[number], self._tables[request_id][number]
            if self.blocks_for(until) <= len(table):
                continue
            index = min(group.first_needed(num_computed) // self.block_size, keep_from) - 1
            while index >= 0 and table[index] != NULL_BLOCK:
                self.pool.give_back(table[index])
                table[index] = NULL_BLOCK
                index, is_any = index - 1, True
        return is_any

    def free(self, request_id: str) -> None:
        """Give back everything that the request holds; nothing when it holds nothing."""
        cache = self.prefix_cache
        if cache is not None:
            cache.withdraw(request_id)
        if self.host_tier is not None:
            self.host_tier.withdraw(request_id)
        for block_id in _from_the_end(self._tables.pop(request_id, ())):
            self.pool.give_back(block_id)

    def publish(self, request_id: str, tables: Tables, first: int, keys: Sequence[bytes]) -> bool:
        """Let others share the request's blocks from the ``first`` on, whose content is ``keys``.

        They must be full and computed, in ``tables``. False, and nothing is done, when the request
        has other tables by now. Those that were given back meanwhile are passed over.
        """
        if self.prefix_cache is None or self._tables.get(request_id) is not tables:
            return False
        for number, table in enumerate(tables):
            for block_id, key in zip(table[first:], keys, strict=False):
                if block_id != NULL_BLOCK:
                    self.prefix_cache.put(group_key(key, number), block_id)
        self.prefix_cache.settle(request_id, keys)
        return True

    def forget(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        """Let nobody else share what the request holds or held behind a window; its full blocks
        have ``keys``, and their content is not to be trusted."""
        cache = self.prefix_cache
        if cache is None:
            return
        of_groups = [group_key(key, number) for key in keys for number in range(len(self.groups))]
        for block_id in {*cache.known(of_groups), *_held(self._tables.get(request_id, ()))}:
            self.pool.forget(block_id)
        if self.host_tier is not None:
            self.host_tier.forget(of_groups)

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold; who holds them keeps them."""
        if self.prefix_cache is not None:
            self.pool.forget_all()
            if self.host_tier is not None:
                self.host_tier.clear()

    def tables(self, request_id: str) -> Tables:
        """The request's blocks for each group: to read, not to change.

        They grow at the end as the request does, and what lies behind a window becomes the null
        block when its table grows; another tuple are tables made anew.
        """
        return self._tables[request_id]

    def holders(self) -> frozenset[str]:
        """Requests that hold blocks."""
        return frozenset(request_id for request_id, tables in self._tables.items() if any(tables))

    def is_writable(self, block_id: int) -> bool:
        """Whether only one request holds the block, and nobody else may come to share it."""
        is_known = self.prefix_cache is not None and block_id in self.prefix_cache
        return self.pool.ref_count(block_id) == 1 and not is_known

    def check(self) -> None:
        """Raise InvariantError when a block is lost, free and used, miscounted, or not there."""
        for request_id, tables in self._tables.items():
            held = list(_held(tables))
            require(len(set(held)) == len(held), f"{request_id} holds a block twice")
            self._check_nulls(request_id, tables)
        by_group = zip(*self._tables.values(), strict=True)
        self.pool.check([list(_held(tables)) for tables in by_group] or [[] for _ in self.groups])
        self._check_cache()

    def _check_nulls(self, request_id: str, tables: Tables) -> None:
        """The null block stands behind windows and nowhere else."""
        for group, table in zip(self.groups, tables, strict=True):
            num_nulls = table.count(NULL_BLOCK)
            is_behind = not any(table[:num_nulls]) and not (group.is_full and num_nulls)
            require(is_behind, f"{request_id} has the null block where it reads")

    def _check_cache(self) -> None:
        if self.prefix_cache is None:
            return
        self.prefix_cache.check()
        owners = self.prefix_cache.promisers
        require(owners <= self._tables.keys(), "a request promises blocks and holds none")
        if self.host_tier is not None:
            self.host_tier.check()
            for request_id in self.host_tier.loading:
                goals = {load.block_id for load in self.host_tier.due(request_id)}
                held = set(_held(self._tables.get(request_id, ())))
                require(goals <= held, f"{request_id} loads into blocks of others")
                unshared = all(self.is_writable(block_id) for block_id in goals)
                require(unshared, f"{request_id} loads into a block that is shared")


def _held(tables: Iterable[BlockTable]) -> Iterator[int]:
    """The blocks in tables, without the null block."""
    return (block_id for table in tables for block_id in table if block_id != NULL_BLOCK)


def _from_the_end(tables: Sequence[BlockTable]) -> Iterator[int]:
    """The blocks of all groups, those of the last tokens first: tails are freed before heads."""
    length = max(map(len, tables), default=0)
    aligned = (chain(repeat(NULL_BLOCK, length - len(t)), reversed(t)) for t in tables)
    rows = chain.from_iterable(zip(*aligned, strict=True))
    return (block_id for block_id in rows if block_id != NULL_BLOCK)
