"""The step loop: plan, run, sample, commit, show."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from octavo.runtime.batch import build_batch
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import EngineError
from octavo.runtime.executor import Executor
from octavo.runtime.output_processor import Finish, OutputKind, OutputProcessor
from octavo.runtime.outputs import EngineStats, RequestOutput
from octavo.runtime.request import Request
from octavo.runtime.sampler import SampledToken, SampleRow, sample
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Streams of requests without a seed of their own; those with one use the numbers below.
_FIRST_OWN_STREAM = 2**32


class Engine:
    """Many requests, one program. Not thread-safe: LLM lets one thread at a time use it."""

    def __init__(
        self,
        executor: Executor,
        blocks: BlockManager,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(config, blocks)
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._num_requests = 0
        self._live: dict[str, OutputProcessor] = {}
        self._num_steps = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        kind: OutputKind = "cumulative",
    ) -> None:
        """Queue a request. Raises InvalidRequest when it could never run."""
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
            arrival_time=time.monotonic(),
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
        """Run one step and give what there is to show of it.

        A transaction: until the tokens are sampled nothing but reserved blocks has changed. When
        the program fails, the requests of the step are ended, and EngineError is raised.
        """
        plan = self.scheduler.schedule()
        if not plan.sequences:
            return []
        started = time.monotonic()
        try:
            sampled = self._run(plan)
        except Exception as error:
            for sequence in plan.sequences:
                self._end(sequence.request_id, Finish("error", str(error)))
            raise EngineError(
                f"a step of {len(plan.sequences)} sequences and {plan.num_tokens} tokens failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        tokens = {i: token.token_id for i, token in sampled.items() if token.error is None}
        self.scheduler.update(plan, tokens)
        now = time.monotonic()
        self._num_steps += 1
        self._output_tokens += len(tokens)
        self._seconds["prefill" if plan.has_prefill else "decode"] += now - started
        outputs = [self._commit(request_id, token, now) for request_id, token in sampled.items()]
        return [output for output in outputs if output is not None]

    def stats(self) -> EngineStats:
        blocks = self.scheduler.blocks
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
        )

    def _run(self, plan: StepPlan) -> dict[str, SampledToken]:
        """A token for each sampled sequence of the plan."""
        logits = self.executor.execute(build_batch(plan, self.scheduler.blocks.block_size))
        request_ids = [s.request_id for s in plan.sequences if s.is_sampled]
        if not request_ids:
            return {}
        tokens = sample(logits, [self._row(request_id) for request_id in request_ids])
        return dict(zip(request_ids, tokens, strict=True))

    def _row(self, request_id: str) -> SampleRow:
        processor = self._live[request_id]
        request = processor.request
        return SampleRow(
            params=request.params,
            seed=request.seed,
            stream=request.stream,
            position=request.num_tokens,
            banned_token_ids=processor.banned_token_ids,
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
        return processor.output()
