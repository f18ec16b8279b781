"""Who runs in the next step. Pure Python, no torch: it is tested, and timed, alone."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.request import Request, RequestStatus

# A request waits for a prefix that is being computed if that saves 1 / so much of its work.
_WORTH_A_WAIT = 4


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    ``max_num_batched_tokens`` tokens and ``max_num_seqs`` sequences a step;
    ``long_prefill_token_threshold`` caps one request's share of it, 0 for no cap.
    ``watermark`` is the share of the blocks that admission leaves to those who run already.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01


class ScheduledSequence(NamedTuple):
    """A request's part of a step: its tokens ``start`` to ``start + num_tokens``.

    ``block_ids`` is the request's own table, which grows with later plans. ``is_sampled`` says that
    the last of the tokens is the last there is, so that its logits give the next. ``source_row``
    is not None when that one token is still being sampled: it is the row of the step before.
    A tuple rather than a dataclass: 256 are made a step.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: array[int]
    is_sampled: bool
    source_row: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """What one step runs. ``preempted`` lost their blocks to it and wait again."""

    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence runs more than its newest token."""
        return any(s.num_tokens > 1 or not s.is_sampled for s in self.sequences)


class _Draft:
    """The step while it is being planned: tokens for each request, out of one budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[str, tuple[Request, int]] = {}
        self.preempted: list[Request] = []

    def place(self, request: Request, num_tokens: int) -> None:
        self.chunks[request.request_id] = request, num_tokens
        self.budget -= num_tokens

    def withdraw(self, request: Request) -> None:
        _, num_tokens = self.chunks.pop(request.request_id, (request, 0))
        self.budget += num_tokens
        self.preempted.append(request)


class Scheduler:
    """Continuous batching: first come first served, decodes before prefill chunks.

    A request is admitted when the blocks for all its known tokens are free, and grows on demand.
    When nothing is free, the request admitted last gives up its blocks and returns to the front
    of the queue with its tokens; it then computes them again, and its output is the same.

    Blocks that the prefix cache has are not computed again, but for the last token's: its logits
    are wanted. A full block may be shared once the tokens of its step were taken, so that nothing
    of a failed step ever is. A request whose prefix is just being computed waits for that while it
    saves a quarter of its work, and others overtake it: many that come at once compute it once.

    A step has three moments: ``schedule`` plans it, ``begin`` says that it was launched, ``update``
    gives its tokens. The next step may be planned and begun before the update of this one: a
    request then runs the token that is being sampled. At most one token of a request is ahead.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}  # in the order of admission
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens of requests when they were first admitted,
        self.prefix_hits = 0  # and how many of them the prefix cache had
        self._watermark_blocks = int(config.watermark * blocks.num_usable_blocks)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest when it could never run, even alone."""
        # The last token is never fed back, so its K and V need no room.
        needed = self.blocks.blocks_for(request.max_total_tokens - 1)
        if needed > self.blocks.num_usable_blocks:
            raise InvalidRequest(
                f"request {request.request_id}: {request.max_total_tokens} tokens of prompt and "
                f"output need {needed} KV blocks, there are {self.blocks.num_usable_blocks}; "
                "lower max_tokens or raise kv_cache_memory_bytes"
            )
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks.

        A step that is still running may write into them. Whoever gets them next writes in a later
        step, and steps run in order: what is left there is overwritten before it is read.
        """
        if self.running.pop(request.request_id, None) is None and request in self.waiting:
            self.waiting.remove(request)
        self.blocks.free(request.request_id)
        request.status = RequestStatus.FINISHED

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """Plan a step and reserve its blocks. A plan that is not followed by ``begin`` (the step
        failed) may simply be made again: progress is counted only there."""
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        table_of = self.blocks.block_ids
        sequences = [
            ScheduledSequence(
                request,
                start := request.num_computed_tokens,
                num_tokens,
                table_of(request_id),
                start + num_tokens == len(request.token_ids) + request.num_pending,
                request.source_row if request.num_pending else None,
            )
            for request_id, (request, num_tokens) in draft.chunks.items()
        ]
        return StepPlan(tuple(sequences), tuple(draft.preempted))

    def begin(self, plan: StepPlan) -> None:
        """Count a step's tokens as computed: it was launched, and steps run in order."""
        row = 0
        for request, start, num_tokens, _, is_sampled, _ in plan.sequences:
            request.num_computed_tokens = start + num_tokens
            if is_sampled:
                request.num_pending += 1
                request.source_row = row
                row += 1

    def update(self, plan: StepPlan, tokens: Sequence[int | None]) -> list[bool]:
        """Give the requests of a step their tokens, in the order of the step's rows.

        None stands for a row that has none. Says for each whether the request took it: one that
        has ended since, and whose row was computed for nothing, does not.
        """
        sampled = [sequence for sequence in plan.sequences if sequence.is_sampled]
        taken = []
        spoiled = set()
        for (request, start, num_tokens, *_), token in zip(sampled, tokens, strict=True):
            # An interrupt between a step's launch and its `begin` makes the next one compute the
            # same token again: the place in the context says which of them the request has.
            is_taken = (
                request.status is not RequestStatus.FINISHED
                and len(request.token_ids) == start + num_tokens
            )
            taken.append(is_taken)
            if is_taken:
                request.num_pending = max(0, request.num_pending - 1)
                if token is not None:
                    request.token_ids.append(token)
                else:
                    # What it has read may be what spoiled its row.
                    self.blocks.forget(request.request_id)
                    spoiled.add(request)
        if self.blocks.prefix_cache is not None:
            self._publish(plan, spoiled)
        return taken

    def _publish(self, plan: StepPlan, spoiled: Collection[Request]) -> None:
        """Let the blocks that a step has filled be shared."""
        block_size = self.blocks.block_size
        for request, start, num_tokens, block_ids, *_ in plan.sequences:
            end = start + num_tokens
            first = request.num_published_blocks
            if end - first * block_size < block_size or request in spoiled:
                continue
            # It may have lost its blocks since, or be about to compute the step's tokens again.
            last = min(end, request.num_computed_tokens) // block_size
            keys = request.block_keys(last, block_size)[first:]
            if keys and self.blocks.publish(request.request_id, block_ids, first, keys):
                request.num_published_blocks = last

    def _continue_running(self, draft: _Draft) -> None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running.values():
            num_tokens = len(request.token_ids) + request.num_pending
            if num_tokens >= request.max_total_tokens:
                continue  # its last token is being sampled
            is_decode = num_tokens - request.num_computed_tokens == 1
            (decodes if is_decode else prefills).append(request)
        for request in decodes:
            if draft.budget == 0:
                return
            if self._has_room(request, draft):
                draft.chunks[request.request_id] = request, 1
                draft.budget -= 1
        for request in prefills:
            if draft.budget == 0:
                return
            if self._has_room(request, draft):
                self._place(request, draft)

    def _admit_waiting(self, draft: _Draft) -> None:
        deferred: list[Request] = []
        num_seats = self.config.max_num_seqs - len(self.running)
        while self.waiting and draft.budget > 0 and num_seats > 0:
            request = self.waiting[0]
            if request.num_pending:
                break  # preempted by a step that failed: its token is still to come
            prefix = self._find_prefix(request)
            num_seats -= (
                1  # for one that is deferred too: so few are looked at that it costs little
            )
            if self._is_worth_a_wait(request, len(prefix)):
                deferred.append(self.waiting.popleft())
                continue
            keep_free = self._watermark_blocks if self.running else 0
            if not self.blocks.can_allocate(
                request.request_id, request.num_tokens, keep_free, prefix
            ):
                break  # nobody overtakes
            self._admit(self.waiting.popleft(), prefix, draft)
        self.waiting.extendleft(reversed(deferred))

    def _admit(self, request: Request, prefix: Sequence[int], draft: _Draft) -> None:
        self._allocate(request, request.num_tokens, prefix)
        request.num_published_blocks = len(prefix)
        request.num_computed_tokens = len(prefix) * self.blocks.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.num_cached_tokens
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        self._place(request, draft)

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks that the request need not compute; never that of its last token."""
        if self.blocks.prefix_cache is None or request.skips_prefix_cache:
            return []
        return self.blocks.find_prefix(self._prefix_keys(request))

    def _prefix_keys(self, request: Request) -> list[bytes]:
        block_size = self.blocks.block_size
        return request.block_keys((request.num_tokens - 1) // block_size, block_size)

    def _is_worth_a_wait(self, request: Request, num_found: int) -> bool:
        """Whether a step that is planned or runs computes what the request needs next, and enough
        of it. Such a step is never far: when there is none, nothing is promised."""
        cache = self.blocks.prefix_cache
        if cache is None or request.skips_prefix_cache or not cache.has_promises:
            return False
        promised = cache.num_promised(self._prefix_keys(request)[num_found:])
        block_size = self.blocks.block_size
        missing = request.num_tokens - num_found * block_size
        return promised > 0 and promised * block_size * _WORTH_A_WAIT >= missing

    def _place(self, request: Request, draft: _Draft) -> None:
        """Give a prompt its share of the step."""
        num_tokens = self._chunk(request, draft.budget)
        draft.place(request, num_tokens)
        cache = self.blocks.prefix_cache
        if cache is not None:
            block_size, start = self.blocks.block_size, request.num_computed_tokens
            last = min(start + num_tokens, request.num_tokens) // block_size
            keys = request.block_keys(last, block_size)[start // block_size :]
            cache.promise(request.request_id, keys)

    def _chunk(self, request: Request, budget: int) -> int:
        missing = len(request.token_ids) + request.num_pending - request.num_computed_tokens
        cap = self.config.long_prefill_token_threshold or missing
        return min(missing, budget, cap)

    def _has_room(self, request: Request, draft: _Draft) -> bool:
        """Reserve blocks for all its tokens; False when it had to yield, now or to one before."""
        if request.status is not RequestStatus.RUNNING:
            return False
        num_tokens = len(request.token_ids) + request.num_pending
        if num_tokens <= request.num_slots:
            return True  # nearly always: a block lasts for many steps
        while not self.blocks.can_allocate(request.request_id, num_tokens):
            victim = next(reversed(self.running.values()))
            self._preempt(victim, draft)
            if victim is request:
                return False
        self._allocate(request, num_tokens)
        return True

    def _allocate(self, request: Request, num_tokens: int, prefix: Sequence[int] = ()) -> None:
        self.blocks.allocate(
            request.request_id, num_tokens, expected_tokens=request.max_total_tokens, prefix=prefix
        )
        request.num_slots = self.blocks.blocks_for(num_tokens) * self.blocks.block_size

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        """Take a request's blocks. A token that is being sampled for it still reaches it."""
        del self.running[victim.request_id]
        draft.withdraw(victim)
        self.blocks.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_slots = victim.num_published_blocks = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
