"""Who runs in the next step. Pure Python, no torch: it is tested, and timed, alone."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.request import Request, RequestStatus


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
    """A request's part of a step: ``token_ids`` go in at positions ``start``, ``start + 1``, ...

    ``is_sampled`` says that the last of them is the last that is known, so that its logits give
    the next token. A tuple rather than a dataclass: 256 are made a step.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_ids: array[int]
    is_sampled: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step runs. ``preempted`` lost their blocks to it and wait again."""

    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence runs more than its newest token."""
        return any(len(s.token_ids) > 1 or not s.is_sampled for s in self.sequences)


class _Draft:
    """The step while it is being planned: tokens for each request, out of one budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[str, int] = {}
        self.preempted: list[str] = []

    def place(self, request_id: str, num_tokens: int) -> None:
        self.chunks[request_id] = num_tokens
        self.budget -= num_tokens

    def withdraw(self, request_id: str) -> None:
        self.budget += self.chunks.pop(request_id, 0)
        self.preempted.append(request_id)


class Scheduler:
    """Continuous batching: first come first served, decodes before prefill chunks.

    A request is admitted when the blocks for all its known tokens are free, and grows on demand.
    When nothing is free, the request admitted last gives up its blocks and returns to the front
    of the queue with its tokens; it then computes them again, and its output is the same.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}  # in the order of admission
        self.num_preemptions = 0
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
        """Take a request out, wherever it is, and free its blocks."""
        if self.running.pop(request.request_id, None) is None and request in self.waiting:
            self.waiting.remove(request)
        self.blocks.free(request.request_id)
        request.status = RequestStatus.FINISHED

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """Plan a step and reserve its blocks. A plan that is not followed by ``update`` (the step
        failed) may simply be made again: progress is committed only there."""
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        return StepPlan(
            tuple(self._sequence(request_id, n) for request_id, n in draft.chunks.items()),
            tuple(draft.preempted),
        )

    def update(self, plan: StepPlan, sampled: Mapping[str, int]) -> None:
        """Commit a step: its tokens are in the cache, and ``sampled`` are the new ones."""
        for request_id, token_ids, start, _, is_sampled in plan.sequences:
            request = self.running.get(request_id)
            if request is None:
                continue  # aborted while the step ran
            request.num_computed_tokens = start + len(token_ids)
            if is_sampled and request_id in sampled:
                request.token_ids.append(sampled[request_id])

    def _continue_running(self, draft: _Draft) -> None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running.values():
            is_decode = len(request.token_ids) - request.num_computed_tokens == 1
            (decodes if is_decode else prefills).append(request)
        for request in (*decodes, *prefills):
            if draft.budget == 0:
                return
            if request.status is RequestStatus.RUNNING and self._make_room(request, draft):
                draft.place(request.request_id, self._chunk(request, draft.budget))

    def _admit_waiting(self, draft: _Draft) -> None:
        while self.waiting and draft.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            keep_free = self._watermark_blocks if self.running else 0
            if not self.blocks.can_allocate(request.request_id, request.num_tokens, keep_free):
                return  # nobody overtakes
            self.waiting.popleft()
            self.blocks.allocate(
                request.request_id, request.num_tokens, expected_tokens=request.max_total_tokens
            )
            request.status = RequestStatus.RUNNING
            self.running[request.request_id] = request
            draft.place(request.request_id, self._chunk(request, draft.budget))

    def _chunk(self, request: Request, budget: int) -> int:
        missing = len(request.token_ids) - request.num_computed_tokens
        cap = self.config.long_prefill_token_threshold or missing
        return min(missing, budget, cap)

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """Reserve blocks for all known tokens; False when the request itself had to yield."""
        num_tokens = len(request.token_ids)
        if self.blocks.num_missing(request.request_id, num_tokens) == 0:
            return True  # nearly always: a block lasts for many steps
        while not self.blocks.can_allocate(request.request_id, num_tokens):
            victim = next(reversed(self.running.values()))
            self._preempt(victim, draft)
            if victim is request:
                return False
        self.blocks.allocate(request.request_id, num_tokens)
        return True

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        del self.running[victim.request_id]
        draft.withdraw(victim.request_id)
        self.blocks.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _sequence(self, request_id: str, num_tokens: int) -> ScheduledSequence:
        request = self.running[request_id]
        start = request.num_computed_tokens
        end = start + num_tokens
        return ScheduledSequence(
            request_id,
            request.token_ids[start:end],
            start,
            self.blocks.block_ids(request_id),
            end == len(request.token_ids),
        )
