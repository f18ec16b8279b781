"""What an engine counts about itself. Plain numbers, written by the thread that runs the steps."""

from __future__ import annotations

from collections import Counter

from octavo.runtime.histogram import Histogram
from octavo.runtime.output_processor import OutputProcessor
from octavo.runtime.outputs import EngineCounts, RequestMetrics
from octavo.runtime.request import Request
from octavo.runtime.scheduler import ScheduledSequence, StepPlan

# Upper bounds in seconds. They hold vLLM's, and finer ones below: steps of a small model take 1 ms.
_STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
TOKEN_BOUNDS = (*_STEP_BOUNDS, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class EngineMetrics:
    """Told of everything that happens to requests and steps."""

    def __init__(self) -> None:
        self._computed_tokens = 0
        self._recomputed_tokens = 0
        self._discarded_tokens = 0
        self._launched_tokens = 0
        self._scheduled_sequences = 0
        self._finished: Counter[str] = Counter()
        self._reached: dict[str, int] = {}  # tokens of a live request that were computed once
        self._queue_seconds: dict[int, Histogram] = {}
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self._between_tokens = Histogram(TOKEN_BOUNDS)
        self._step_tokens = Histogram(COUNT_BOUNDS)
        self._of_requests = {
            "queue_seconds": Histogram(REQUEST_BOUNDS),
            "prefill_seconds": Histogram(REQUEST_BOUNDS),
            "decode_seconds": Histogram(REQUEST_BOUNDS),
            "inference_seconds": Histogram(REQUEST_BOUNDS),
            "request_seconds": Histogram(REQUEST_BOUNDS),
            "seconds_per_output_token": Histogram(TOKEN_BOUNDS),
            "prompt_tokens": Histogram(COUNT_BOUNDS),
            "output_tokens": Histogram(COUNT_BOUNDS),
        }

    def step(self, plan: StepPlan, launched_tokens: int) -> None:
        """A step has run; ``launched_tokens`` are its tokens with the padding."""
        num_tokens = plan.num_tokens
        self._computed_tokens += num_tokens
        self._launched_tokens += launched_tokens
        self._scheduled_sequences += len(plan.sequences)
        self._step_tokens.observe(num_tokens)

    def prefill(self, sequence: ScheduledSequence) -> None:
        """A part of a prompt, or of what a preempted request had, is being computed."""
        request, end = sequence.request, sequence.start + sequence.num_tokens
        reached = self._reached.get(request.request_id, 0)
        if request.num_output_tokens:
            reached = max(reached, request.num_tokens - 1)  # all but the newest token
        self._recomputed_tokens += max(0, min(end, reached) - sequence.start)
        self._reached[request.request_id] = max(end, reached)

    def discarded(self, num_tokens: int) -> None:
        self._discarded_tokens += num_tokens

    def scheduled(self, request: Request, metrics: RequestMetrics, now: float) -> None:
        """A request is in a step for the first time."""
        metrics.first_scheduled_time = now
        priority = request.priority
        if priority not in self._queue_seconds:
            self._queue_seconds[priority] = Histogram(REQUEST_BOUNDS)
        self._queue_seconds[priority].observe(now - metrics.arrival_time)

    def token(self, metrics: RequestMetrics, now: float) -> None:
        """A request has got a token."""
        last = metrics.last_token_time
        if last is None:
            self._first_token.observe(now - metrics.arrival_time)
        else:
            self._between_tokens.observe(now - last)
        metrics.last_token_time = now

    def finished(self, processor: OutputProcessor) -> None:
        """A request has ended."""
        finish, request, times = processor.finish, processor.request, processor.metrics
        assert finish is not None
        self._finished[finish.reason] += 1
        self._reached.pop(request.request_id, None)
        of = self._of_requests
        of["prompt_tokens"].observe(request.num_prompt_tokens)
        of["output_tokens"].observe(request.num_output_tokens)
        if times.finished_time is None:
            return
        of["request_seconds"].observe(times.finished_time - times.arrival_time)
        if times.first_scheduled_time is None or times.first_token_time is None:
            return
        of["queue_seconds"].observe(times.first_scheduled_time - times.arrival_time)
        of["prefill_seconds"].observe(times.first_token_time - times.first_scheduled_time)
        of["inference_seconds"].observe(times.finished_time - times.first_scheduled_time)
        decode_seconds = times.finished_time - times.first_token_time
        of["decode_seconds"].observe(decode_seconds)
        if request.num_output_tokens > 1:
            of["seconds_per_output_token"].observe(decode_seconds / (request.num_output_tokens - 1))

    def value(self) -> EngineCounts:
        """All of it now. Any thread."""
        histograms = {
            "first_token_seconds": self._first_token,
            "inter_token_seconds": self._between_tokens,
            "step_tokens": self._step_tokens,
            **self._of_requests,
        }
        return EngineCounts(
            computed_tokens=self._computed_tokens,
            recomputed_tokens=self._recomputed_tokens,
            discarded_tokens=self._discarded_tokens,
            launched_tokens=self._launched_tokens,
            scheduled_sequences=self._scheduled_sequences,
            finished=dict(self._finished),
            histograms={name: each.value() for name, each in histograms.items()},
            queue_seconds={
                priority: each.value() for priority, each in list(self._queue_seconds.items())
            },
        )
