"""Which blocks of the KV cache belong to whom. Pure Python: it never sees a tensor."""

from __future__ import annotations

from array import array
from collections import OrderedDict

NULL_BLOCK = 0


class BlockManager:
    """Fixed-size blocks, reference-counted, handed out on demand.

    A request's block table grows with its context. Freed blocks go to the back of the queue, a
    request's last block first, so that the queue is also the order in which a prefix cache would
    evict: least recently used first, tails before heads. A cached block is then one whose count
    is zero and that is still in the queue; taking it again is removing it from the queue.

    Nothing depends on where a block lies, but a kernel reads a request whose blocks lie in a row as
    one slice. So a request grows into the next block while that is free, and starts where the
    blocks that it may come to need are likely to be.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """``num_blocks`` counts the null block 0, which is never handed out."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens hold nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))  # oldest first
        self._next_start = NULL_BLOCK + 1
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, array[int]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks the request needs to hold ``num_tokens`` tokens in all."""
        missing = -(-num_tokens // self.block_size) - len(self._tables.get(request_id, ()))
        return missing if missing > 0 else 0

    def can_allocate(self, request_id: str, num_tokens: int, keep_free: int = 0) -> bool:
        """Whether ``allocate`` would succeed and leave ``keep_free`` blocks free."""
        missing = self.num_missing(request_id, num_tokens)
        return missing == 0 or missing + keep_free <= len(self._free)

    def allocate(self, request_id: str, num_tokens: int, expected_tokens: int = 0) -> None:
        """Grow the request's table until it holds ``num_tokens`` tokens in all.

        ``expected_tokens`` is what it may come to hold. It reserves nothing: the next request to
        start leaves so much room if it can.
        """
        missing = self.num_missing(request_id, num_tokens)
        assert missing <= len(self._free), "ask can_allocate first"
        table = self._tables.setdefault(request_id, array("i"))
        for _ in range(missing):
            wish = table[-1] + 1 if table else self._place(max(num_tokens, expected_tokens))
            block_id = self._take(wish)
            self._ref_counts[block_id] = 1
            table.append(block_id)

    def _place(self, expected_tokens: int) -> int:
        """Where a request that may grow to this many tokens would like to start."""
        start, extent = self._next_start, self.blocks_for(expected_tokens)
        if start + extent > self.num_blocks:
            start = NULL_BLOCK + 1
        self._next_start = start + extent
        return start

    def _take(self, wish: int) -> int:
        """The block that is wished for if it is free, else the one that is free the longest."""
        if wish in self._free:
            del self._free[wish]
            return wish
        return self._free.popitem(last=False)[0]

    def free(self, request_id: str) -> None:
        """Give back everything that the request holds; nothing when it holds nothing."""
        for block_id in reversed(self._tables.pop(request_id, array("i"))):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def block_ids(self, request_id: str) -> array[int]:
        """The request's blocks, int32, in the order of its context: to read, not to change.

        It grows at the end as the request does; another array is a table made anew.
        """
        return self._tables[request_id]

    def check(self) -> None:
        """Raise AssertionError when a block is lost, free and used, or miscounted."""
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"{request_id} holds a block twice"
            for block_id in table:
                references[block_id] += 1
        free = list(self._free)
        assert len(set(free)) == len(free), "a block is free twice"
        assert references == self._ref_counts, "reference counts differ from the tables"
        assert references[NULL_BLOCK] == 0, "the null block was handed out"
        assert NULL_BLOCK not in free, "the null block is in the free queue"
        used = {block_id for block_id, count in enumerate(references) if count > 0}
        assert used.isdisjoint(free), f"free and used: {sorted(used.intersection(free))}"
        assert len(used) + len(free) == self.num_usable_blocks, "a block was lost"
