"""When a request takes blocks from the prefix cache, waits for them, or gives its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.request import Request

# A request waits for a prefix that is being computed if that saves 1 / so much of its work.
_WORTH_A_WAIT = 4


class PrefixSharing:
    """The prefix cache as the scheduler uses it; without one nothing is found.

    ``num_queries`` are the tokens of requests when they were first admitted, ``num_hits`` how many
    of them were there, and ``num_host_hits`` how many of those had to come from host memory.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._cache = blocks.prefix_cache
        self._block_size = blocks.block_size
        self.num_queries = 0
        self.num_hits = 0
        self.num_host_hits = 0

    def find(self, request: Request) -> list[int]:
        """Blocks that the request need not compute; never that of its last token."""
        if self._cache is None or request.skips_prefix_cache:
            return []
        return self._cache.find(self._keys(request))

    def is_worth_a_wait(self, request: Request, num_found: int) -> bool:
        """Whether a step that is planned or runs computes what the request needs next, and enough
        of it. Such a step is never far: when there is none, nothing is promised."""
        if self._cache is None or not self._cache.has_promises or request.skips_prefix_cache:
            return False
        num_promised = self._cache.num_promised(self._keys(request)[num_found:])
        missing = request.num_tokens - num_found * self._block_size
        return num_promised * self._block_size * _WORTH_A_WAIT >= missing

    def find_on_host(self, request: Request, num_found: int) -> list[bytes]:
        """Keys after those of ``num_found`` blocks whose content is rather loaded from host memory
        than computed: of a long enough run of them."""
        tier = self._blocks.host_tier
        if tier is None or request.skips_prefix_cache:
            return []
        keys = self._keys(request)[num_found:]
        num_there = len(tier.find(keys))
        if num_there * self._block_size < tier.min_load_tokens:
            return []
        return list(keys[:num_there])

    def count(self, request: Request, num_found: int, num_loaded: int = 0) -> None:
        """Note what a request that is admitted has found and what it loads.

        That is shared like what it computes, once the step that loads it has succeeded. Totals
        count the first time that it is admitted.
        """
        request.num_published_blocks = num_found
        request.num_computed_tokens = (num_found + num_loaded) * self._block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queries += request.num_tokens
            self.num_hits += request.num_cached_tokens
            self.num_host_hits += num_loaded * self._block_size

    def promise(self, request: Request, num_tokens: int) -> None:
        """Say that the next step computes so many of the request's tokens, or loads them."""
        if self._cache is None:
            return
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        keys = request.block_keys(end // self._block_size, self._block_size)
        keys = keys[request.num_published_blocks :]
        self._cache.promise(request.request_id, keys)

    def publish(self, request: Request, end: int, block_ids: array[int]) -> None:
        """Let the blocks be shared that a step filled, of which the request's tokens before ``end``
        are computed. ``block_ids`` is its table as the step had it."""
        first = request.num_published_blocks
        # It may have lost its blocks since, or be about to compute the step's tokens again.
        last = min(end, request.num_computed_tokens) // self._block_size
        keys = request.block_keys(last, self._block_size)[first:]
        if keys and self._blocks.publish(request.request_id, block_ids, first, keys):
            request.num_published_blocks = last

    def _keys(self, request: Request) -> Sequence[bytes]:
        return request.block_keys((request.num_tokens - 1) // self._block_size, self._block_size)
