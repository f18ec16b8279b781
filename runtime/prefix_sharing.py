"""When a request takes blocks from the prefix cache, waits for them, or gives its own."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.runtime.block_manager import BlockManager, Tables
from octavo.runtime.prefix_hit import PrefixHit
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

    def find(self, request: Request) -> PrefixHit:
        """What the request need not compute; never the block of its last token."""
        if self._cache is None or request.skips_prefix_cache:
            return self._blocks.find_prefix(())
        return self._blocks.find_prefix(self._keys(request))

    def is_worth_a_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a step that is planned or runs computes what the request needs next, and enough
        of it. Such a step is never far: when there is none, nothing is promised."""
        if self._cache is None or not self._cache.has_promises or request.skips_prefix_cache:
            return False
        num_promised = self._cache.num_promised(self._keys(request)[hit.num_blocks :])
        missing = request.num_tokens - hit.num_blocks * self._block_size
        return num_promised * self._block_size * _WORTH_A_WAIT >= missing

    def find_on_host(self, request: Request, hit: PrefixHit) -> PrefixHit:
        """The hit with what is rather loaded from host memory than computed: a long enough run."""
        if request.skips_prefix_cache:
            return hit
        return self._blocks.find_on_host(self._keys(request), hit)

    def count(self, request: Request, hit: PrefixHit) -> None:
        """Note what a request that is admitted has found and what it loads.

        That is shared like what it computes, once the step that loads it has succeeded. Totals
        count the first time that it is admitted.
        """
        request.num_published_blocks = hit.num_shared
        request.num_computed_tokens = hit.num_blocks * self._block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queries += request.num_tokens
            self.num_hits += request.num_cached_tokens
            self.num_host_hits += hit.num_loaded * self._block_size

    def promise(self, request: Request, num_tokens: int) -> None:
        """Say that the next step computes so many of the request's tokens, or loads them."""
        if self._cache is None:
            return
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        keys = request.block_keys(end // self._block_size, self._block_size)
        keys = keys[request.num_published_blocks :]
        self._cache.promise(request.request_id, keys)

    def publish(self, request: Request, end: int, tables: Tables) -> None:
        """Let the blocks be shared that a step filled, of which the request's tokens before ``end``
        are computed. ``tables`` are those that the step had."""
        first = request.num_published_blocks
        # It may have lost its blocks since, or be about to compute the step's tokens again.
        last = min(end, request.num_computed_tokens) // self._block_size
        keys = request.block_keys(last, self._block_size)[first:]
        if keys and self._blocks.publish(request.request_id, tables, first, keys):
            request.num_published_blocks = last

    def _keys(self, request: Request) -> Sequence[bytes]:
        return request.block_keys((request.num_tokens - 1) // self._block_size, self._block_size)
