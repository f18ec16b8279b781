"""Runs requests through an engine and keeps the time of every step.

Decode is measured from the end of the last step that ran any part of a prompt to the end of the
last step before which no request had ended: in between every request gets one token a step, and
nothing else happens. Prefill and the tail, in which a part of the batch still runs, are left out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.results import StepGroup
from octavo.bench.workload import Job
from octavo.ir.errors import OctavoError
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class StepTime:
    """State after a step: seconds since the start, tokens and ended requests so far."""

    seconds: float
    num_tokens: int
    num_finished: int
    has_prefill: bool


@dataclass(frozen=True)
class Timeline:
    """A run of requests that were all submitted at once."""

    num_requests: int
    steps: list[StepTime]

    @property
    def seconds(self) -> float:
        """From the first request's submission to the last one's end."""
        return self.steps[-1].seconds

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return self.steps[-1].num_tokens

    @property
    def prefill_seconds(self) -> float:
        """From the first request's submission to the end of the last step with prefill."""
        return self.steps[self._last_prefill()].seconds

    @property
    def first_token_seconds(self) -> float:
        """From the submission to the end of the first step that gave a token."""
        return next(step.seconds for step in self.steps if step.num_tokens)

    def decode(self) -> tuple[int, float]:
        """Number and seconds of the steps in which all requests decode and nothing else happens.

        Raises OctavoError when there are none, and when not all requests ran at once.
        """
        start = self._last_prefill()
        end = next(i for i, step in enumerate(self.steps) if step.num_finished)
        if end <= start:
            raise OctavoError(
                f"no step had all {self.num_requests} requests decoding; ask for longer outputs "
                "(--output-len)"
            )
        first, last = self.steps[start], self.steps[end]
        if last.num_tokens - first.num_tokens != self.num_requests * (end - start):
            raise OctavoError(
                f"the {self.num_requests} requests did not all run at once; the KV cache does not "
                "hold them: ask for a smaller batch or shorter lengths"
            )
        return end - start, last.seconds - first.seconds

    def groups(self) -> list[StepGroup]:
        """Steps with parts of prompts, then decode steps by the number of sequences in them."""
        found: dict[str, list[float]] = {}
        before = StepTime(0.0, 0, 0, has_prefill=True)
        for step in self.steps:
            kind = "prompts" if step.has_prefill else _decode_kind(step, before)
            found.setdefault(kind, []).append(step.seconds - before.seconds)
            before = step
        return [StepGroup(kind, len(each), sum(each)) for kind, each in found.items()]

    def _last_prefill(self) -> int:
        return max(i for i, step in enumerate(self.steps) if step.has_prefill)


def _decode_kind(step: StepTime, before: StepTime) -> str:
    """By the next power of two above the number of sequences: each got a token."""
    num_seqs = max(1, step.num_tokens - before.num_tokens)
    return f"decode, up to {1 << (num_seqs - 1).bit_length()}"


def run(engine: Engine, jobs: Sequence[Job]) -> Timeline:
    """Submit all jobs at once, greedily and past any end of sequence, and step until they end."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=j.new_tokens, ignore_eos=True, detokenize=False)
        for j in jobs
    ]
    before = engine.stats()
    prefill, finished, steps = before.prefill_seconds, 0, []
    start = time.perf_counter()
    for job, each in zip(jobs, params, strict=True):
        engine.add_request(f"bench-{next(_NUMBERS)}", job.prompt, each, kind="final")
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        errors = [
            o.outputs[0].stop_reason for o in outputs if o.outputs[0].finish_reason == "error"
        ]
        if errors:
            raise OctavoError(f"a request failed: {errors[0]}")
        finished += sum(output.finished for output in outputs)
        stats = engine.stats()
        num_tokens = stats.output_tokens - before.output_tokens
        steps.append(StepTime(now, num_tokens, finished, stats.prefill_seconds > prefill))
        prefill = stats.prefill_seconds
    wanted = sum(job.new_tokens for job in jobs)
    if finished != len(jobs) or steps[-1].num_tokens != wanted:
        raise OctavoError(f"{steps[-1].num_tokens} tokens came, {wanted} were asked for")
    return Timeline(len(jobs), steps)
