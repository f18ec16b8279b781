"""The step loop: plan, launch, take the tokens, commit, show."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.runtime.batch import BatchBuilder
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import EngineError, require
from octavo.runtime.executor import PendingStep, StepExecutor
from octavo.runtime.grammars import Grammars
from octavo.runtime.invariants import check_invariants
from octavo.runtime.logit_rules import make_rules
from octavo.runtime.metrics import EngineMetrics
from octavo.runtime.output_processor import Finish, OutputKind, OutputProcessor
from octavo.runtime.outputs import EngineStats, RequestOutput
from octavo.runtime.parallel_sampling import ParallelSampling, join_outputs
from octavo.runtime.policies import Urgency
from octavo.runtime.prefix_cache import root_key
from octavo.runtime.request import Request
from octavo.runtime.sampler import SampledToken, SampleRow
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Streams of requests without a seed of their own; those with one use the numbers below.
_FIRST_OWN_STREAM = 2**32


@dataclass(frozen=True)
class _Launched:
    """A step that is running."""

    plan: StepPlan
    pending: PendingStep
    started: float
    num_tokens: int  # with padding


@dataclass(frozen=True)
class Source:
    """What all samples of a request have in common: the prompt, and when and for whom it is."""

    token_ids: Sequence[int]
    prompt: str | None
    root_key: bytes
    urgency: Urgency
    arrival_time: float


class Engine:
    """Many requests, one program. Not thread-safe: LLM lets one thread at a time use it.

    With ``async_scheduling`` a step is launched before the tokens of the one before are read, so
    that planning, detokenising and showing take no time of the device. A request that turns out to
    have ended then has one row computed for nothing, which is dropped; no answer changes.
    """

    def __init__(
        self,
        executor: StepExecutor,
        blocks: BlockManager,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        async_scheduling: bool = False,
        content_id: str = "",
        check_invariants: bool = False,
    ) -> None:
        """``content_id`` names what is computed: only equal ones may share blocks.

        ``check_invariants`` has the books checked after each step, see octavo.runtime.invariants.
        """
        self.executor = executor
        self.scheduler = Scheduler(config, blocks)
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        # A configuration may name an end that the model cannot write, -1 for one.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=self.eos_token_ids)
        self._seed = seed
        self._content_id = content_id
        self._check_invariants = check_invariants
        self._batches = BatchBuilder(blocks.block_size, blocks.groups)
        self._max_in_flight = 2 if async_scheduling else 1
        self._in_flight: deque[_Launched] = deque()
        self._is_launch_open = False
        self._late: list[RequestOutput] = []  # of requests that ran out of time
        self._num_requests = 0
        self._live: dict[str, OutputProcessor] = {}
        self._groups: dict[str, ParallelSampling] = {}
        self._group_of: dict[str, ParallelSampling] = {}  # by the ids of its samples
        self._num_steps = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._metrics = EngineMetrics()
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._last_finish = 0.0
        self._deadlines = {"met": 0, "missed": 0}
        self._queue_timeouts = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
        queue_timeout_ms: float | None = None,
        client: str = "",
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. Raises InvalidRequest when it could never run.

        ``cache_salt``: only requests with the same one share blocks of the prefix cache. The next
        four say when it is to run: see octavo.runtime.policies.Urgency. ``arrival_time`` is when
        it came, by time.monotonic; None is now.
        """
        assert not self.is_live(request_id), "request ids are unique"
        source = Source(
            prompt_token_ids,
            prompt,
            root_key(self._content_id, cache_salt=cache_salt),
            Urgency(priority, deadline_ms, queue_timeout_ms, client),
            time.monotonic() if arrival_time is None else arrival_time,
        )
        self._add(request_id, source, params, kind)

    def _add(
        self, request_id: str, source: Source, params: SamplingParams, kind: OutputKind
    ) -> None:
        count = params.best_of or params.n
        group = ParallelSampling(request_id, params, kind) if count > 1 else None
        if group is None:
            samples = [self._processor(request_id, source, params, kind)]
        else:
            samples = [
                self._processor(
                    sample_id,
                    source,
                    group.params_of(index),
                    group.kind,
                    sample_of=(request_id, index),
                )
                for index, sample_id in enumerate(group.sample_ids)
            ]
        for processor in samples:
            self.scheduler.add(processor.request)
            self._live[processor.request.request_id] = processor
        self._prompt_tokens += len(source.token_ids)
        if group is not None:
            self._groups[request_id] = group
            self._group_of.update(dict.fromkeys(group.sample_ids, group))

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its memory; None when it is not there (any more)."""
        group = self._groups.get(request_id)
        ids = [request_id] if group is None else group.sample_ids
        ended = [self._end(each, Finish("abort")) for each in ids if each in self._live]
        late = [output for output in self._late if output.request_id == request_id]
        self._late = [output for output in self._late if output.request_id != request_id]
        return join_outputs([*late, *ended])

    def is_live(self, request_id: str) -> bool:
        """Whether the request is still to give its last output."""
        return (
            request_id in self._live
            or request_id in self._groups
            or any(output.request_id == request_id for output in self._late)
        )

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._late)

    def step(self) -> list[RequestOutput]:
        """Take the tokens of the oldest step that runs, and give what there is to show of them.

        Before that, end who has run out of time, and launch what may be in flight beside it. A step
        is a transaction: until its tokens are there nothing has changed for its requests but
        reserved blocks. When the program fails, the requests of the step are ended, and EngineError
        is raised.
        """
        try:
            return self._step()
        finally:
            if self._check_invariants:
                self.check()

    def check(self) -> None:
        """Raise InvariantError when a block is lost, wrongly shared, or held by who may not."""
        check_invariants(self.scheduler)
        waiting = (request.request_id for request in self.scheduler.waiting)
        known = self.scheduler.running.keys() | set(waiting)
        require(known == self._live.keys(), "the scheduler has other requests than the engine")
        tier = self.scheduler.blocks.host_tier
        if tier is not None:
            saves = {save for launched in self._in_flight for save in launched.plan.saves}
            is_written = tier.writing <= saves.union(tier.drafted)
            require(is_written, "a slot of host memory waits for a step that is over")

    def _step(self) -> list[RequestOutput]:
        if self._is_launch_open and self._in_flight:
            # The last launch was interrupted or failed half-way. It may have sampled tokens where
            # the next step would look for those of the step before: that one is read first.
            return self._finish_oldest()
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.schedule()
            self._end_expired()
            if not plan.sequences:
                break
            self._launch(plan)
        outputs = self._finish_oldest() if self._in_flight else []
        late, self._late = self._late, []
        return late + outputs

    def _end_expired(self) -> None:
        """End the requests whose time is over. Kept until a step succeeds to show them."""
        while self.scheduler.expired:
            request, reason = self.scheduler.expired.popleft()
            if request.request_id not in self._live:
                continue  # aborted after an interrupt
            output = self._end(request.request_id, Finish(reason))
            if output is not None:
                self._late.append(output)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed, so that it is computed again when it is asked for."""
        self.scheduler.blocks.reset_prefix_cache()

    def stats(self) -> EngineStats:
        blocks, tier = self.scheduler.blocks, self.scheduler.blocks.host_tier
        allocated = (blocks.num_usable_blocks - blocks.num_free_blocks) * blocks.block_size
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_blocks=blocks.num_free_blocks,
            num_total_blocks=blocks.num_usable_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            prefill_seconds=self._seconds["prefill"],
            decode_seconds=self._seconds["decode"],
            num_cached_blocks=blocks.num_cached_blocks,
            num_group_blocks=tuple(blocks.pool.num_held),
            prefix_cache_queries=self.scheduler.sharing.num_queries,
            prefix_cache_hits=self.scheduler.sharing.num_hits,
            host_cache_hits=self.scheduler.sharing.num_host_hits,
            num_saved_blocks=tier.num_saved if tier is not None else 0,
            num_loaded_blocks=tier.num_loaded if tier is not None else 0,
            num_host_blocks=tier.num_slots if tier is not None else 0,
            num_used_host_blocks=tier.num_used_slots if tier is not None else 0,
            deadlines_met=self._deadlines["met"],
            deadlines_missed=self._deadlines["missed"],
            queue_timeouts=self._queue_timeouts,
            num_used_slots=allocated - self._num_unused_slots(),
            num_allocated_slots=allocated,
            max_num_seqs=self.scheduler.config.max_num_seqs,
            counts=self._metrics.value(),
        )

    def _processor(
        self,
        request_id: str,
        source: Source,
        params: SamplingParams,
        kind: OutputKind,
        sample_of: tuple[str, int] | None = None,
    ) -> OutputProcessor:
        """A new request. Samples of one prompt share its seed, and differ by their stream."""
        own_seed = params.seed is not None
        index = 0 if sample_of is None else sample_of[1]
        request = Request(
            request_id,
            source.token_ids,
            params,
            max_model_len=self.max_model_len,
            seed=params.seed if params.seed is not None else self._seed,
            stream=index if own_seed else _FIRST_OWN_STREAM + self._num_requests,
            root_key=source.root_key,
            arrival_time=source.arrival_time,
            priority=source.urgency.priority,
            deadline=source.urgency.deadline(source.arrival_time),
            queue_deadline=source.urgency.queue_deadline(source.arrival_time),
            client=source.urgency.client,
        )
        self._num_requests += 1
        rules = make_rules(
            params,
            source.token_ids,
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            grammars=self.grammars,
        )
        request.waits_for_token = rules is not None and rules.depends_on_output
        processor = OutputProcessor(
            request,
            prompt=source.prompt,
            kind=kind,
            tokenizer=self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            arrival_time=source.arrival_time,
            rules=rules,
            sample_of=sample_of,
        )
        if rules is not None:
            rules.check_first(processor.banned_token_ids, self._vocab_size)
        return processor

    def _num_unused_slots(self) -> int:
        """Slots of the running requests' blocks in which there is nothing yet."""
        running = list(self.scheduler.running.values())  # any thread may ask
        unused = self.scheduler.blocks.num_unused_slots
        return sum(unused(request.request_id, request.num_computed_tokens) for request in running)

    def _launch(self, plan: StepPlan) -> None:
        started = time.monotonic()
        self._is_launch_open = True
        try:
            rows = [self._row(s.request) for s in plan.sequences if s.is_sampled]
            for _, request, start, stop in plan.prompt_rows:
                rows += self._live[request.request_id].prompt_rows(start, stop)
            pending = self.executor.launch(self._batches.build(plan), rows)
        except Exception as error:
            raise self._failed(plan, error) from error
        self._in_flight.append(_Launched(plan, pending, started, self.executor.num_launched_tokens))
        self.scheduler.begin(plan)
        self._is_launch_open = False
        self._count_prefill(plan, started)

    def _finish_oldest(self) -> list[RequestOutput]:
        launched = self._in_flight[0]
        plan = launched.plan
        try:
            sampled = launched.pending.result()
        except Exception as error:
            self._in_flight.popleft()
            raise self._failed(plan, error) from error
        requests = [sequence.request for sequence in plan.sequences if sequence.is_sampled]
        sampled, prompt_rows = sampled[: len(requests)], sampled[len(requests) :]
        tokens = [None if token.error else token.token_id for token in sampled]
        taken = self.scheduler.update(plan, tokens)
        # Not before: after an interrupt the step's tokens must be there to be read again.
        self._in_flight.popleft()
        now = time.monotonic()
        self._count(launched, now)
        self._metrics.discarded(len(taken) - sum(taken))
        outputs = self._take_prompt_rows(plan, prompt_rows)
        for request, token, is_taken in zip(requests, sampled, taken, strict=True):
            if is_taken and request.request_id in self._live:
                self._output_tokens += token.error is None
                self._count_token(request, launched.started, now)
                outputs.append(self._commit(request.request_id, token, now))
        return [output for output in outputs if output is not None]

    def _take_prompt_rows(
        self, plan: StepPlan, rows: Sequence[SampledToken]
    ) -> list[RequestOutput | None]:
        """Give requests the log-probabilities of their prompts; the outputs of those that end."""
        outputs, at = [], 0
        for _, request, start, stop in plan.prompt_rows:
            mine, at = rows[at : at + stop - start], at + stop - start
            if any(row.error for row in mine):
                self.scheduler.distrust(request)
            processor = self._live.get(request.request_id)
            try:
                # Its id may be another's by now, if it was ended while the step ran.
                if processor is not None and processor.request is request:
                    processor.take_prompt_rows(start, mine)
            except Exception as error:
                outputs.append(self._end_faulty(request.request_id, error))
        return outputs

    def _failed(self, plan: StepPlan, error: Exception) -> EngineError:
        """End the requests of a step that failed."""
        self.scheduler.abandon(plan)
        for sequence in plan.sequences:
            request_id = sequence.request.request_id
            processor = self._live.get(request_id)
            # Its id may be another's by now, if it was ended while the step ran.
            if processor is not None and processor.request is sequence.request:
                self._end(request_id, Finish("error", str(error)))
        return EngineError(
            f"a step of {len(plan.sequences)} sequences and {plan.num_tokens} tokens failed: "
            f"{type(error).__name__}: {error}"
        )

    def _count_prefill(self, plan: StepPlan, now: float) -> None:
        if not plan.has_prefill:
            return
        for sequence in plan.sequences:
            request, start, num_tokens, _, is_sampled, *_ = sequence
            if num_tokens == 1 and is_sampled and start > 0:
                continue
            metrics = self._live[request.request_id].metrics
            if metrics.first_scheduled_time is None:
                self._metrics.scheduled(request, metrics, now)
            self._metrics.prefill(sequence)

    def _count_token(self, request: Request, started: float, now: float) -> None:
        metrics = self._live[request.request_id].metrics
        if metrics.first_scheduled_time is None:  # a prompt of one token runs like a decode
            self._metrics.scheduled(request, metrics, started)
        self._metrics.token(metrics, now)

    def _count(self, launched: _Launched, now: float) -> None:
        self._num_steps += 1
        self._metrics.step(launched.plan, launched.num_tokens)
        # Steps overlap: each counts from the end of the one before, so that they add up.
        seconds = now - max(launched.started, self._last_finish)
        self._seconds["prefill" if launched.plan.has_prefill else "decode"] += seconds
        self.scheduler.deadlines.observe_step(seconds)
        self._last_finish = now

    def _row(self, request: Request) -> SampleRow:
        params, processor = request.params, self._live[request.request_id]
        return SampleRow(
            params,
            request.seed,
            request.stream,
            len(request.token_ids) + request.num_pending,
            processor.banned_token_ids if params.min_tokens else (),
            None if processor.rules is None else processor.rules.edits(),
        )

    def _commit(self, request_id: str, token: SampledToken, now: float) -> RequestOutput | None:
        """Show a request its token. What goes wrong here ends this request and no other."""
        processor = self._live[request_id]
        try:
            if token.error is not None:
                raise EngineError(token.error)
            processor.append(token, now)
        except Exception as error:
            return self._end_faulty(request_id, error)
        if processor.finish is not None:
            return self._end(request_id, processor.finish)
        return self._shown(processor)

    def _end_faulty(self, request_id: str, error: Exception) -> RequestOutput | None:
        logger.error("request %s ended: %s", request_id, error)
        return self._end(request_id, Finish("error", f"{type(error).__name__}: {error}"))

    def _end(self, request_id: str, finish: Finish) -> RequestOutput | None:
        processor = self._live.pop(request_id)
        self.scheduler.finish(processor.request)
        if processor.finish is None:
            processor.end(finish, time.monotonic())
        self._metrics.finished(processor)
        self._count_end(processor)
        return self._shown(processor)

    def _shown(self, processor: OutputProcessor) -> RequestOutput | None:
        """What there is to show of a request, or of the one that it is a sample of."""
        output = processor.output()
        group = self._group_of.get(processor.request.request_id)
        if group is None or output is None:
            return output
        if output.finished:
            del self._group_of[processor.request.request_id]
        shown = group.take(output)
        if group.is_finished:
            del self._groups[group.request_id]
        return shown

    def _count_end(self, processor: OutputProcessor) -> None:
        reason = processor.finish.reason if processor.finish is not None else None
        if reason == "queue_timeout":
            self._queue_timeouts += 1
        elif processor.request.deadline < math.inf and reason in ("stop", "length", "deadline"):
            self._deadlines["missed" if reason == "deadline" else "met"] += 1
