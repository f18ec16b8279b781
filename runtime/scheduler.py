"""Who runs in the next step. Pure Python, no torch: it is tested, and timed, alone."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
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


class PromptRows(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt whose logits are wanted: they say how likely the
    next token was. They are in sequence number ``place`` of the step."""

    place: int
    request: Request
    start: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """What one step runs. ``preempted`` lost their blocks to it and wait again.

    Its rows of logits are those of the sequences that are sampled, then ``prompt_rows``.
    """

    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[Request, ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence runs more than its newest token."""
        return any(s.num_tokens > 1 or not s.is_sampled for s in self.sequences)


class _Draft:
    """The step while it is being planned: tokens for each request, out of one budget.

    A step has as many rows of logits as sequences at most. One is kept for each sequence;
    ``spare_rows`` are left for more sequences, or for more tokens of a prompt than one.
    """

    def __init__(self, budget: int, spare_rows: int) -> None:
        self.budget = budget
        self.spare_rows = spare_rows
        self.has_prompt_rows = False
        self.chunks: dict[str, tuple[Request, int]] = {}
        self.preempted: list[Request] = []

    def place(self, request: Request, num_tokens: int) -> None:
        self.chunks[request.request_id] = request, num_tokens
        self.budget -= num_tokens

    def place_prompt(self, request: Request, num_tokens: int) -> None:
        """Place tokens of which all may need their logits."""
        num_tokens = min(num_tokens, 1 + self.spare_rows)
        self.spare_rows -= num_tokens - 1
        self.has_prompt_rows = True
        self.place(request, num_tokens)

    def withdraw(self, request: Request) -> None:
        _, num_tokens = self.chunks.pop(request.request_id, (request, 0))
        self.budget += num_tokens
        self.preempted.append(request)


class Scheduler:
    """Continuous batching: first come first served, decodes before prefill chunks.

    A request is admitted when the blocks for all its known tokens are free, and grows on demand.
    When nothing is free, the request admitted last gives up its blocks and returns to the front
    of the queue with its tokens; it then computes them again, and its output is the same.

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
        draft = _Draft(
            self.config.max_num_batched_tokens, self.config.max_num_seqs - len(self.running)
        )
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
        prompt_rows = _prompt_rows(sequences) if draft.has_prompt_rows else ()
        return StepPlan(tuple(sequences), tuple(draft.preempted), prompt_rows)

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
        return taken

    def _continue_running(self, draft: _Draft) -> None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running.values():
            num_tokens = len(request.token_ids) + request.num_pending
            if num_tokens >= request.max_total_tokens:
                continue  # its last token is being sampled
            if request.num_pending and request.waits_for_token:
                continue
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
                self._place_chunk(request, draft)

    def _admit_waiting(self, draft: _Draft) -> None:
        # Without a spare row there is no room for a sequence either, see _Draft.
        while self.waiting and draft.budget > 0 and draft.spare_rows > 0:
            request = self.waiting[0]
            keep_free = self._watermark_blocks if self.running else 0
            if request.num_pending:
                return  # preempted by a step that failed: its token is still to come
            if not self.blocks.can_allocate(request.request_id, request.num_tokens, keep_free):
                return  # nobody overtakes
            self.waiting.popleft()
            self._allocate(request, request.num_tokens)
            request.status = RequestStatus.RUNNING
            self.running[request.request_id] = request
            draft.spare_rows -= 1
            self._place_chunk(request, draft)

    def _place_chunk(self, request: Request, draft: _Draft) -> None:
        num_tokens = self._chunk(request, draft.budget)
        if request.wants_prompt_logprobs:
            draft.place_prompt(request, num_tokens)
        else:
            draft.place(request, num_tokens)

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

    def _allocate(self, request: Request, num_tokens: int) -> None:
        self.blocks.allocate(
            request.request_id, num_tokens, expected_tokens=request.max_total_tokens
        )
        request.num_slots = self.blocks.blocks_for(num_tokens) * self.blocks.block_size

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        """Take a request's blocks. A token that is being sampled for it still reaches it."""
        del self.running[victim.request_id]
        draft.withdraw(victim)
        self.blocks.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_slots = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)


def _prompt_rows(sequences: Sequence[ScheduledSequence]) -> tuple[PromptRows, ...]:
    rows = []
    for place, (request, start, num_tokens, *_) in enumerate(sequences):
        if request.wants_prompt_logprobs:
            # No token of the prompt comes after its last one.
            first = max(start, request.num_prompt_logprobs)
            stop = min(start + num_tokens, request.num_prompt_tokens - 1)
            if first < stop:
                rows.append(PromptRows(place, request, first, stop))
    return tuple(rows)
