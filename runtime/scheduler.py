"""Who runs in the next step. Pure Python, no torch: it is tested, and timed, alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from octavo.runtime.block_manager import BlockManager, Tables
from octavo.runtime.deadlines import Deadlines, Expired
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.fair_queue import FairQueue
from octavo.runtime.host_tier import Load, Save
from octavo.runtime.policies import PROMPT_TOKENS_A_STEP, make_policy
from octavo.runtime.prefix_hit import PrefixHit
from octavo.runtime.prefix_sharing import PrefixSharing
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, and the order of requests.

    ``max_num_batched_tokens`` tokens and ``max_num_seqs`` sequences a step;
    ``long_prefill_token_threshold`` caps one request's share of it, 0 for no cap.
    ``watermark`` is the share of the blocks that admission leaves to those who run already.
    ``policy`` and ``ageing_seconds``: see octavo.runtime.policies.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    policy: str = "fcfs"
    ageing_seconds: float = 60.0

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of one request that a step computes."""
        cap = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(cap, self.max_num_batched_tokens)


class ScheduledSequence(NamedTuple):
    """A request's part of a step: its tokens ``start`` to ``start + num_tokens``.

    ``tables`` are the request's own, one for each block group, which change with later plans.
    ``is_sampled`` says that the last of the tokens is the last there is, so that its logits give
    the next. ``source_row`` is not None when that one token is still being sampled: it is the row
    of the step before. A tuple rather than a dataclass: 256 are made a step.
    """

    request: Request
    start: int
    num_tokens: int
    tables: Tables
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

    Before its tokens it copies K and V of whole blocks, first all of ``saves`` to host memory, then
    all of ``loads`` back: a block may be saved and then loaded into. Its rows of logits are those
    of the sequences that are sampled, then ``prompt_rows``.
    """

    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[Request, ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence runs more than its newest token."""
        return any(s.num_tokens > 1 or not s.is_sampled for s in self.sequences)


_rank = attrgetter("rank")


class _Draft:
    """The step while it is being planned: tokens for each request, out of one budget.

    A step has as many rows of logits as sequences at most. One is kept for each sequence;
    ``spare_rows`` are left for more sequences, or for more tokens of a prompt than one.
    """

    def __init__(self, budget: int, spare_rows: int) -> None:
        self.budget = budget
        self.spare_rows = spare_rows
        self.has_prompt_rows = False
        self._more_rows: dict[str, int] = {}
        self.chunks: dict[str, tuple[Request, int]] = {}
        self.preempted: list[Request] = []
        self.is_short_of_blocks = False

    def place(self, request: Request, num_tokens: int) -> None:
        self.chunks[request.request_id] = request, num_tokens
        self.budget -= num_tokens

    def place_prompt(self, request: Request, num_tokens: int) -> int:
        """Place tokens of which all may need their logits: as many as there are rows for."""
        num_tokens = min(num_tokens, 1 + self.spare_rows)
        self._more_rows[request.request_id] = num_tokens - 1
        self.spare_rows -= num_tokens - 1
        self.has_prompt_rows = True
        self.place(request, num_tokens)
        return num_tokens

    def share(self, request: Request) -> int:
        """Tokens that a request has been given."""
        return self.chunks.get(request.request_id, (request, 0))[1]

    def rows(self, request: Request) -> int:
        """Rows of logits that are kept for a request that runs."""
        return 1 + self._more_rows.get(request.request_id, 0)

    def withdraw(self, request: Request) -> None:
        self.budget += self.share(request)
        self.spare_rows += self.rows(request)
        self.chunks.pop(request.request_id, None)
        self._more_rows.pop(request.request_id, None)
        self.preempted.append(request)


class Scheduler:
    """Continuous batching: decodes before prefill chunks, both in the order that a policy gives.

    A request is admitted when the blocks for all its known tokens are free, and grows on demand.
    When nothing is free, the least urgent that runs gives up its blocks and waits again with its
    tokens; it then computes them again, and its output is the same. One that is more urgent than
    others that run may take their place as well where the policy says so, whether it lacks blocks,
    a seat among ``max_num_seqs``, or a share of the budget.

    Blocks that the prefix cache has are not computed again, but for the last token's: its logits
    are wanted. A full block may be shared once the tokens of its step were taken, so that nothing
    of a failed step ever is. A request whose prefix is just being computed waits for that while it
    saves a quarter of its work, and others overtake it: many that come at once compute it once.

    Requests that ran out of time are in ``expired``, for whoever ends them. ``clock`` gives
    seconds.

    With a host tier, blocks that are evicted are saved to host memory, and matching goes on there
    where the prefix cache ends. A preempted request's blocks take the same way, out and in.

    A step has three moments: ``schedule`` plans it, ``begin`` says that it was launched, ``update``
    gives its tokens. The next step may be planned and begun before the update of this one: a
    request then runs the token that is being sampled. At most one token of a request is ahead.
    ``abandon`` says that a step failed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = make_policy(config.policy, config.ageing_seconds)
        self.sharing = PrefixSharing(blocks)
        self.deadlines = Deadlines()
        self.waiting = (
            FairQueue(PROMPT_TOKENS_A_STEP) if self.policy.shares_service else WaitingQueue()
        )
        self.running: dict[str, Request] = {}  # in the order of admission
        self.expired: deque[Expired] = deque()
        self.num_preemptions = 0
        self._clock = clock
        self._now = clock()
        self._num_added = 0
        self._watermark_blocks = int(config.watermark * blocks.num_usable_blocks)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest when it could never run, even alone."""
        # The last token is never fed back, so its K and V need no room.
        longest = request.max_total_tokens - 1
        needed = self.blocks.most_blocks(longest, self.config.max_chunk_tokens)
        if needed > self.blocks.num_usable_blocks:
            raise InvalidRequest(
                f"request {request.request_id}: {request.max_total_tokens} tokens of prompt and "
                f"output need {needed} KV blocks, there are {self.blocks.num_usable_blocks}; "
                "lower max_tokens or raise kv_cache_memory_bytes"
            )
        if request.priority and not self.policy.heeds_priority:
            raise InvalidRequest(
                f"request {request.request_id}: priority={request.priority} means nothing under "
                f"scheduling_policy='{self.config.policy}'; load with scheduling_policy='priority'",
                param="priority",
            )
        request.order = self._num_added
        request.rank = self.policy.rank(request)
        self._num_added += 1
        self.deadlines.watch(request)
        self.waiting.push(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks.

        A step that is still running may write into them. Whoever gets them next writes in a later
        step, and steps run in order: what is left there is overwritten before it is read.
        """
        if self.running.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        else:
            self.waiting.ended(request)
        self.blocks.free(request.request_id)
        request.status = RequestStatus.FINISHED

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self.expired)

    def schedule(self) -> StepPlan:
        """Plan a step and reserve its blocks. A plan that is not followed by ``begin`` (the step
        failed) may simply be made again: progress is counted only there."""
        self._now = self._clock()
        host_tier = self.blocks.host_tier
        if host_tier is not None:
            host_tier.begin_plan()
        for expired in self.deadlines.expired(self._now):
            self._expire(expired)
        draft = _Draft(
            self.config.max_num_batched_tokens, self.config.max_num_seqs - len(self.running)
        )
        self._continue_running(draft)
        if not draft.is_short_of_blocks:
            self._admit_waiting(draft)
        table_of = self.blocks.tables
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
        plan = StepPlan(tuple(sequences), tuple(draft.preempted), prompt_rows)
        if host_tier is None:
            return plan
        loading = [name for name in host_tier.loading if name in draft.chunks]
        loads = tuple(load for name in loading for load in host_tier.due(name))
        return replace(plan, saves=tuple(host_tier.drafted), loads=loads)

    def begin(self, plan: StepPlan) -> None:
        """Count a step's tokens as computed: it was launched, and steps run in order."""
        row = 0
        for request, start, num_tokens, _, is_sampled, _ in plan.sequences:
            request.num_computed_tokens = start + num_tokens
            if is_sampled:
                request.num_pending += 1
                request.source_row = row
                row += 1
        if self.blocks.host_tier is not None:
            self.blocks.host_tier.launched(s.request.request_id for s in plan.sequences)

    def abandon(self, plan: StepPlan) -> None:
        """Forget what a step was to save: it failed. Whoever asks finishes its requests as well."""
        if self.blocks.host_tier is not None:
            self.blocks.host_tier.abandon(plan.saves)

    def update(self, plan: StepPlan, tokens: Sequence[int | None]) -> list[bool]:
        """Give the requests of a step their tokens, in the order of the step's rows.

        None stands for a row that has none. Says for each whether the request took it: one that
        has ended since, and whose row was computed for nothing, does not.
        """
        if self.blocks.host_tier is not None:
            self.blocks.host_tier.commit(plan.saves)
        sampled = [sequence for sequence in plan.sequences if sequence.is_sampled]
        taken = []
        spoiled = set()
        for (request, start, num_tokens, _, _, _), token in zip(sampled, tokens, strict=True):
            # An interrupt between a step's launch and its `begin` makes the next one compute the
            # same token again: the place in the context says which of them the request has.
            is_taken = (
                len(request.token_ids) == start + num_tokens
                and request.status is not RequestStatus.FINISHED
            )
            taken.append(is_taken)
            if is_taken:
                if request.num_pending:
                    request.num_pending -= 1
                if token is not None:
                    request.token_ids.append(token)
                else:
                    self.distrust(request)
                    spoiled.add(request)
        if self.blocks.prefix_cache is not None:
            block_size = self.blocks.block_size
            for request, start, num_tokens, tables, _, _ in plan.sequences:
                is_filled = start + num_tokens >= (request.num_published_blocks + 1) * block_size
                if is_filled and request not in spoiled:
                    self.sharing.publish(request, start + num_tokens, tables)
        return taken

    def distrust(self, request: Request) -> None:
        """Let nobody share what a request has computed or read: something there spoiled a row."""
        num_full = request.num_tokens // self.blocks.block_size
        keys = request.block_keys(num_full, self.blocks.block_size)
        self.blocks.forget(request.request_id, keys)

    def _expire(self, expired: Expired) -> None:
        """Take a request out that has run out of time. Whoever reads ``expired`` finishes it."""
        self.finish(expired.request)
        self.expired.append(expired)

    def _decodes_and_prefills(self) -> tuple[list[Request], list[Request]]:
        """Those that run, by whether they have one token to do or more."""
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
        return decodes, prefills

    def _continue_running(self, draft: _Draft) -> None:
        decodes, prefills = self._decodes_and_prefills()
        for request in decodes:
            if draft.budget == 0:
                break
            is_roomy = request.num_computed_tokens < request.num_slots  # nearly always
            if is_roomy or self._has_room(request, draft):
                draft.chunks[request.request_id] = request, 1
                draft.budget -= 1
        for request in sorted(prefills, key=_rank):
            if self.policy.has_displacement and not draft.is_short_of_blocks:
                self._admit_waiting(draft, before=request)
            if draft.budget == 0:
                break
            if self._has_room(request, draft):
                self._place(request, draft)

    def _admit_waiting(self, draft: _Draft, before: Request | None = None) -> None:
        """Admit those who wait while there is room for the first of them: nobody overtakes.

        ``before``: only such as would displace that one, before it gets its share of the step.
        """
        deferred: list[Request] = []
        while self._may_admit(draft, len(deferred), before):
            request = self.waiting.peek()
            if self.deadlines.is_hopeless(request, self._now):
                self._expire(Expired(request, "deadline"))
                continue
            hit = self.sharing.find(request)
            if self.sharing.is_worth_a_wait(request, hit):
                deferred.append(self.waiting.pop())
                continue
            hit = self.sharing.find_on_host(request, hit)
            if not self._make_room(request, hit, len(deferred), draft):
                break
            self._admit(self.waiting.pop(), hit, draft)
        for request in deferred:
            self.waiting.push(request)

    def _may_admit(self, draft: _Draft, num_deferred: int, before: Request | None) -> bool:
        """Whether the first that waits is worth a closer look.

        One that is deferred takes a seat for this step: that bounds how many are looked at.
        """
        if not self.waiting or num_deferred >= self.config.max_num_seqs:
            return False
        if not self.policy.has_displacement:
            num_seats = draft.spare_rows - num_deferred
            if num_seats <= 0 or draft.budget == 0:
                return False
        request = self.waiting.peek()
        if before is not None and not self.policy.displaces(request, before):
            return False
        # Not one that has given way in this very step, nor one whose token is still to come.
        return not request.num_pending and request not in draft.preempted

    def _make_room(
        self, request: Request, hit: PrefixHit, num_deferred: int, draft: _Draft
    ) -> bool:
        """Whether a request fits into the step; others may give way to it, but not in vain."""
        num_seats = draft.spare_rows - num_deferred
        num_free, budget = self.blocks.num_free_blocks, draft.budget
        num_freed = 0
        candidates = self._displaced_by(request)
        victims: list[Request] = []
        while True:
            keep_free = self._watermark_blocks if len(self.running) > len(victims) else 0
            if num_seats > 0 and budget > 0:
                until = self._first_end(request, hit, budget)
                num_missing = self.blocks.num_taken(
                    request.request_id, request.num_tokens, hit, until
                )
                if num_missing + keep_free <= num_free + num_freed:
                    break
            victim = next(candidates, None)
            if victim is None:
                return False
            victims.append(victim)
            num_seats += draft.rows(victim)
            num_freed = self.blocks.num_freed((v.request_id for v in victims), hit.block_ids)
            budget += draft.share(victim)
        for victim in victims:
            self._preempt(victim, draft)
        return True

    def _displaced_by(self, request: Request) -> Iterator[Request]:
        """Those that run and have to give way to a request, the least urgent first."""
        if self.policy.has_displacement:
            displaces = self.policy.displaces
            candidates = [other for other in self.running.values() if displaces(request, other)]
            yield from sorted(candidates, key=_rank, reverse=True)

    def _admit(self, request: Request, hit: PrefixHit, draft: _Draft) -> None:
        until = self._first_end(request, hit, draft.budget)
        self._allocate(request, request.num_tokens, until, hit)
        self.sharing.count(request, hit)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._now
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        draft.spare_rows -= 1
        self._place(request, draft)

    def _place(self, request: Request, draft: _Draft) -> None:
        """Give a prompt its share of the step."""
        num_tokens = self._chunk(request, draft.budget)
        if request.wants_prompt_logprobs:
            num_tokens = draft.place_prompt(request, num_tokens)
        else:
            draft.place(request, num_tokens)
        self.sharing.promise(request, num_tokens)

    def _chunk(self, request: Request, budget: int) -> int:
        missing = len(request.token_ids) + request.num_pending - request.num_computed_tokens
        # Blocks of groups with a window are there for a chunk at a time.
        room = request.num_slots - request.num_computed_tokens
        return min(self._wanted_chunk(missing, budget), room)

    def _wanted_chunk(self, missing: int, budget: int) -> int:
        return min(missing, budget, self.config.long_prefill_token_threshold or missing)

    def _first_end(self, request: Request, hit: PrefixHit, budget: int) -> int:
        """Where the first chunk ends of a request that is to be admitted."""
        found = hit.num_blocks * self.blocks.block_size
        return found + self._wanted_chunk(request.num_tokens - found, budget)

    def _has_room(self, request: Request, draft: _Draft) -> bool:
        """Reserve blocks for all its tokens; False when it had to yield, now or to one before."""
        if request.status is not RequestStatus.RUNNING:
            return False
        num_tokens = len(request.token_ids) + request.num_pending
        if num_tokens <= request.num_slots:
            return True  # nearly always: a block lasts for many steps
        name, num_computed = request.request_id, request.num_computed_tokens
        until = num_computed + self._wanted_chunk(num_tokens - num_computed, draft.budget)
        # Not what a step in flight computes: others may wait for it.
        keep_from = num_tokens if self.blocks.prefix_cache is None else request.num_published_blocks
        self.blocks.drop_behind(name, num_computed, until, keep_from)
        while not self.blocks.can_allocate(name, num_tokens, until=until):
            if self.blocks.drop_behind(name, num_computed, until, num_tokens):
                continue
            victim = max(self.running.values(), key=_rank)
            draft.is_short_of_blocks = True
            self._preempt(victim, draft)
            if victim is request:
                return False
        self._allocate(request, num_tokens, until)
        return True

    def _allocate(
        self, request: Request, num_tokens: int, until: int, hit: PrefixHit | None = None
    ) -> None:
        self.blocks.allocate(
            request.request_id,
            num_tokens,
            expected_tokens=request.max_total_tokens,
            prefix=hit,
            until=until,
        )
        request.num_slots = self.blocks.num_slots(request.request_id)

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        """Take a request's blocks. A token that is being sampled for it still reaches it."""
        del self.running[victim.request_id]
        draft.withdraw(victim)
        self.blocks.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_slots = victim.num_published_blocks = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)


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
