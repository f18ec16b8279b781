"""The step loop: plan, launch, take the tokens, commit, show."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.runtime.batch import BatchBuilder
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import EngineError
from octavo.runtime.executor import PendingStep, StepExecutor
from octavo.runtime.metrics import EngineMetrics
from octavo.runtime.output_processor import Finish, OutputKind, OutputProcessor
from octavo.runtime.outputs import EngineStats, RequestOutput
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
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        async_scheduling: bool = False,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(config, blocks)
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._batches = BatchBuilder(blocks.block_size)
        self._max_in_flight = 2 if async_scheduling else 1
        self._in_flight: deque[_Launched] = deque()
        self._num_requests = 0
        self._live: dict[str, OutputProcessor] = {}
        self._num_steps = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._metrics = EngineMetrics()
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._last_finish = 0.0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        kind: OutputKind = "cumulative",
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. Raises InvalidRequest when it could never run.

        ``arrival_time`` is when it came, by time.monotonic; None is now.
        """
        assert request_id not in self._live, "request ids are unique"
        own_seed = params.seed is not None
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_model_len=self.max_model_len,
            seed=params.seed if params.seed is not None else self._seed,
            stream=0 if own_seed else _FIRST_OWN_STREAM + self._num_requests,
        )
        processor = OutputProcessor(
            request,
            prompt=prompt,
            kind=kind,
            tokenizer=self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )
        self.scheduler.add(request)
        self._num_requests += 1
        self._prompt_tokens += request.num_prompt_tokens
        self._live[request_id] = processor

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its memory; None when it is not there (any more)."""
        if request_id not in self._live:
            return None
        return self._end(request_id, Finish("abort"))

    def is_live(self, request_id: str) -> bool:
        """Whether the request is still to give its last output."""
        return request_id in self._live

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Take the tokens of the oldest step that runs, and give what there is to show of them.

        Before that, launch what may be in flight beside it. A step is a transaction: until its
        tokens are there nothing has changed for its requests but reserved blocks. When the program
        fails, the requests of the step are ended, and EngineError is raised.
        """
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.schedule()
            if not plan.sequences:
                break
            self._launch(plan)
        return self._finish_oldest() if self._in_flight else []

    def stats(self) -> EngineStats:
        blocks = self.scheduler.blocks
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
            num_used_slots=allocated - self._num_unused_slots(),
            num_allocated_slots=allocated,
            max_num_seqs=self.scheduler.config.max_num_seqs,
            counts=self._metrics.value(),
        )

    def _num_unused_slots(self) -> int:
        """Slots of the running requests' blocks in which there is nothing yet."""
        running = list(self.scheduler.running.values())  # any thread may ask
        return sum(max(0, request.num_slots - request.num_computed_tokens) for request in running)

    def _launch(self, plan: StepPlan) -> None:
        started = time.monotonic()
        try:
            rows = [self._row(s.request) for s in plan.sequences if s.is_sampled]
            pending = self.executor.launch(self._batches.build(plan), rows)
        except Exception as error:
            raise self._failed(plan, error) from error
        self._in_flight.append(_Launched(plan, pending, started, self.executor.num_launched_tokens))
        self.scheduler.begin(plan)
        self._count_prefill(plan, started)

    def _finish_oldest(self) -> list[RequestOutput]:
        launched = self._in_flight[0]
        plan = launched.plan
        try:
            sampled = launched.pending.result()
        except Exception as error:
            self._in_flight.popleft()
            raise self._failed(plan, error) from error
        tokens = [None if token.error else token.token_id for token in sampled]
        taken = self.scheduler.update(plan, tokens)
        # Not before: after an interrupt the step's tokens must be there to be read again.
        self._in_flight.popleft()
        now = time.monotonic()
        self._count(launched, now)
        self._metrics.discarded(len(taken) - sum(taken))
        outputs = []
        requests = [sequence.request for sequence in plan.sequences if sequence.is_sampled]
        for request, token, is_taken in zip(requests, sampled, taken, strict=True):
            if is_taken:
                self._output_tokens += token.error is None
                self._count_token(request, launched.started, now)
                outputs.append(self._commit(request.request_id, token, now))
        return [output for output in outputs if output is not None]

    def _failed(self, plan: StepPlan, error: Exception) -> EngineError:
        """End the requests of a step that failed."""
        for request in {s.request.request_id for s in plan.sequences} & self._live.keys():
            self._end(request, Finish("error", str(error)))
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
        self._last_finish = now

    def _row(self, request: Request) -> SampleRow:
        params = request.params
        return SampleRow(
            params,
            request.seed,
            request.stream,
            len(request.token_ids) + request.num_pending,
            self._live[request.request_id].banned_token_ids if params.min_tokens else (),
        )

    def _commit(self, request_id: str, token: SampledToken, now: float) -> RequestOutput | None:
        """Show a request its token. What goes wrong here ends this request and no other."""
        processor = self._live[request_id]
        try:
            if token.error is not None:
                raise EngineError(token.error)
            processor.append(token, now)
        except Exception as error:
            logger.error("request %s ended: %s", request_id, error)
            return self._end(request_id, Finish("error", f"{type(error).__name__}: {error}"))
        if processor.finish is not None:
            return self._end(request_id, processor.finish)
        return processor.output()

    def _end(self, request_id: str, finish: Finish) -> RequestOutput | None:
        processor = self._live.pop(request_id)
        self.scheduler.finish(processor.request)
        if processor.finish is None:
            processor.end(finish, time.monotonic())
        self._metrics.finished(processor)
        return processor.output()
