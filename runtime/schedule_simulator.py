"""A trace of requests through the real scheduler, with a cost model in place of a model.

It answers what a policy would do to a service, in seconds and on a laptop. Pure Python: it needs
neither PyTorch nor an artifact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.policies import Urgency
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan
from octavo.runtime.validation import integer, real


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace: when it comes, and its lengths in tokens.

    ``max_tokens`` is what its user allows, all that the scheduler knows of ``output_tokens``.
    Raises InvalidRequest for an impossible value.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    urgency: Urgency = field(default_factory=Urgency)

    def __post_init__(self) -> None:
        real("arrival", self.arrival_seconds, low=0.0)
        integer("prompt_tokens", self.prompt_tokens, low=1)
        integer("output_tokens", self.output_tokens, low=1)
        integer("max_tokens", self.max_tokens, low=self.output_tokens)


@dataclass(frozen=True)
class CostModel:
    """What a step costs: a part of its own, and so much a token of each kind.

    ``context_token_us`` is for each token of context that a sequence of the step reads.
    """

    step_ms: float = 10.0
    prefill_token_us: float = 50.0
    decode_token_us: float = 50.0
    context_token_us: float = 0.01

    def seconds(self, plan: StepPlan) -> float:
        """How long a step takes."""
        prefill = decode = context = 0
        for _, start, num_tokens, _, _, _ in plan.sequences:
            if num_tokens > 1:
                prefill += num_tokens
            else:
                decode += 1
            context += start + num_tokens
        micros = (
            prefill * self.prefill_token_us
            + decode * self.decode_token_us
            + context * self.context_token_us
        )
        return self.step_ms / 1e3 + micros / 1e6


@dataclass
class Outcome:
    """What became of a request. Times are seconds from the start of the trace; ``reason`` is its
    finish reason."""

    request: TraceRequest
    reason: str = ""
    first_token_seconds: float | None = None
    end_seconds: float = math.nan
    num_preemptions: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it got all of its answer, in time if there was one to keep."""
        return self.reason == "length"

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token, None when there was none."""
        if self.first_token_seconds is None:
            return None
        return self.first_token_seconds - self.request.arrival_seconds

    @property
    def latency_seconds(self) -> float:
        return self.end_seconds - self.request.arrival_seconds


@dataclass(frozen=True)
class Simulation:
    """``outcomes`` in the order of the trace; ``seconds`` until the last request ended."""

    outcomes: Sequence[Outcome]
    seconds: float
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulator:
    """Replays a trace. Raises InvalidRequest for a request that could never run."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        groups: Sequence[BlockGroup] = (FULL,),
        cost: CostModel | None = None,
    ) -> None:
        self._clock = _Clock()
        blocks = BlockManager(num_blocks + 1, block_size, groups=groups, enable_prefix_caching=True)
        self.scheduler = Scheduler(config, blocks, self._clock)
        self._cost = cost or CostModel()
        self._live: dict[str, Outcome] = {}
        self._num_steps = self._num_computed = 0

    def run(self, trace: Iterable[TraceRequest]) -> Simulation:
        """Run all requests to their ends, in the order of their arrivals."""
        outcomes = [Outcome(request) for request in trace]
        numbered = sorted(enumerate(outcomes), key=lambda item: item[1].request.arrival_seconds)
        to_come = deque(numbered)
        while to_come or self._live:
            while to_come and to_come[0][1].request.arrival_seconds <= self._clock.now:
                self._add(*to_come.popleft())
            plan = self.scheduler.schedule()
            self._end_expired()
            if plan.sequences:
                self._step(plan)
            elif to_come:
                self._clock.now = max(self._clock.now, to_come[0][1].request.arrival_seconds)
            else:
                assert not self._live, "requests wait and nobody runs"
        return Simulation(
            outcomes,
            self._clock.now,
            self._num_steps,
            self.scheduler.num_preemptions,
            self._num_computed,
        )

    def _add(self, number: int, outcome: Outcome) -> None:
        traced = outcome.request
        blocks = self.scheduler.blocks
        longest = traced.prompt_tokens + traced.max_tokens - 1
        needed = blocks.most_blocks(longest, self.scheduler.config.max_chunk_tokens)
        if needed > blocks.num_usable_blocks:
            raise InvalidRequest(
                f"request {number} of the trace needs {needed} KV blocks, there are "
                f"{blocks.num_usable_blocks}; raise num_blocks"
            )
        arrival, urgency = traced.arrival_seconds, traced.urgency
        request = Request(
            str(number),
            [number] * traced.prompt_tokens,  # so that no two requests share a block
            SamplingParams(max_tokens=traced.max_tokens),
            max_model_len=traced.prompt_tokens + traced.max_tokens,
            arrival_time=arrival,
            priority=urgency.priority if self.scheduler.policy.heeds_priority else 0,
            deadline=urgency.deadline(arrival),
            queue_deadline=urgency.queue_deadline(arrival),
            client=urgency.client,
        )
        self.scheduler.add(request)
        self._live[request.request_id] = outcome

    def _step(self, plan: StepPlan) -> None:
        seconds = self._cost.seconds(plan)
        self.scheduler.begin(plan)
        self._clock.now += seconds
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        requests = [s.request for s in plan.sequences if s.is_sampled]
        self.scheduler.update(plan, [0] * len(requests))
        self.scheduler.deadlines.observe_step(seconds)
        for request in requests:
            outcome = self._live[request.request_id]
            if outcome.first_token_seconds is None:
                outcome.first_token_seconds = self._clock.now
            if request.num_output_tokens >= outcome.request.output_tokens:
                self._end(request, "length")

    def _end_expired(self) -> None:
        while self.scheduler.expired:
            request, reason = self.scheduler.expired.popleft()
            self._end(request, reason)

    def _end(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request)
        outcome = self._live.pop(request.request_id)
        outcome.reason = reason
        outcome.end_seconds = self._clock.now
        outcome.num_preemptions = request.num_preemptions
