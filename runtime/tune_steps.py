"""Chooses once more among the fastest candidates, now by the time of whole decode steps.

A kernel that is fastest when it is replayed alone may hold up its neighbours in a step: the next
one begins while it runs, on what it leaves of the SMs. So candidates that were nearly the fastest
alone are tried in the step, one module after another, and stay if the step gets faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from octavo.runtime.candidates import Candidate, chosen, problem_of
from octavo.runtime.kernel import Bucket
from octavo.runtime.module_calls import StepProgram, StepSize

_NEAR = 1.3  # times the fastest alone: what is slower is not tried in a step
_MOST = 5  # of a module
_ROUNDS = 2
_MARGIN = 0.995  # a step has to be faster by this: times have noise


@dataclass
class Contest:
    """Candidates of one module for the rows of a step, that chosen so far first, then the fastest,
    with the seconds that all its calls in the step took by themselves. What failed is not there."""

    module: str
    bucket: Bucket
    default: Candidate
    alone: list[tuple[float, Candidate]]

    @property
    def candidates(self) -> list[Candidate]:
        """Those that are worth a try: what is nearly as fast, and the default."""
        return [
            each
            for number, (seconds, each) in enumerate(self.alone)
            if each == self.default or (number < _MOST and seconds <= _NEAR * self.alone[0][0])
        ]

    @property
    def has_default(self) -> bool:
        """False if the default failed."""
        return any(each == self.default for _, each in self.alone)


@dataclass(frozen=True)
class TunedStep:
    """Seconds of a decode step of so many rows: by the defaults, by what is fastest alone, and by
    what was chosen in the end. ``changed`` are the modules where that is not the fastest alone."""

    rows: int
    default: float
    alone: float
    chosen: float
    changed: list[str]


def tune_step(
    step: StepProgram,
    size: StepSize,
    contests: Sequence[Contest],
    timer: Callable[[Callable[[], None]], float],
    *,
    deadline: float,
) -> TunedStep:
    """Choose for all contests by the time of a step of this size, until the deadline.

    What a step begins with is the better of all defaults and all that are fastest alone. Raises
    GpuFault.
    """
    run = step.ready(size)

    def body() -> None:
        run()

    def seconds() -> float:
        return timer(body)

    defaults = [(each, each.default) for each in contests if each.has_default]
    by_default = _with_all(defaults, seconds)
    by_alone = seconds()
    best = by_alone
    if by_default < _MARGIN * by_alone:
        best = by_default
        for each, default in defaults:
            each.bucket.chosen = dict(default)
    alone = {id(each): each.alone[0][1] for each in contests}
    weightiest = sorted(contests, key=lambda each: -each.alone[0][0])
    for _ in range(_ROUNDS):
        before = best
        for each in weightiest:
            best = _choose(each, best, seconds, step, deadline)
        if best == before or time.monotonic() > deadline:
            break
    changed = [each.module for each in contests if each.bucket.chosen != alone[id(each)]]
    return TunedStep(size.num_tokens, by_default, by_alone, best, changed)


def _with_all(choices: Sequence[tuple[Contest, Candidate]], seconds: Callable[[], float]) -> float:
    with ExitStack() as stack:
        for contest, candidate in choices:
            stack.enter_context(chosen(contest.bucket, candidate))
        return seconds()


def _choose(
    contest: Contest,
    best: float,
    seconds: Callable[[], float],
    step: StepProgram,
    deadline: float,
) -> float:
    """Keep the candidate with which the step is fastest; the seconds of the step with it."""
    for candidate in contest.candidates:
        if candidate == contest.bucket.chosen or time.monotonic() > deadline:
            continue
        try:
            found = _with_all([(contest, candidate)], seconds)
        except Exception as error:
            problem_of(error, step.device)  # raises if the GPU takes no work any more
            continue
        if found < _MARGIN * best:
            contest.bucket.chosen, best = dict(candidate), found
    return best
