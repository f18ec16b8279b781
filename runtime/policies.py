"""In which order requests run, and who gives way to whom.

A policy gives each request a rank when it arrives; the lower one goes first. A rank never changes,
so that a queue of them is a heap. Ageing is in the rank: it is a time, later than the arrival by
what the policy holds against the request, so that whoever waits is overtaken less and less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.runtime.request import Rank, Request
from octavo.runtime.validation import integer, real, refusal

# Estimated work is counted in decode steps. So many tokens of a prompt cost as much as one: between
# what a GPU (200) and a CPU (20) were seen to need.
PROMPT_TOKENS_A_STEP = 100
# So many steps count as much as the ageing time.
STEPS_AN_AGE = 1000
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class Urgency:
    """What a user says about when a request is to run.

    ``priority``: lower is more urgent, as in vLLM. ``deadline_ms`` after its arrival the request is
    of no use any more, ``queue_timeout_ms`` after it it is not to be started. ``client`` is whose
    it is, for the policy that shares service. Raises InvalidRequest for an impossible value.
    """

    priority: int = 0
    deadline_ms: float | None = None
    queue_timeout_ms: float | None = None
    client: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.client, str):
            raise refusal("client", f"must be a string, got {self.client!r:.80}")
        integer("priority", self.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        for name in ("deadline_ms", "queue_timeout_ms"):
            value = getattr(self, name)
            if value is not None and real(name, value) <= 0:
                raise refusal(name, f"must be above 0, got {value:g}")

    def deadline(self, arrival_time: float) -> float:
        """When it has to be done, infinity for never; in seconds, as the arrival."""
        return math.inf if self.deadline_ms is None else arrival_time + self.deadline_ms / 1e3

    def queue_deadline(self, arrival_time: float) -> float:
        """When it has to be started."""
        timeout = self.queue_timeout_ms
        return math.inf if timeout is None else arrival_time + timeout / 1e3


class Policy(Protocol):
    """``rank`` orders those that wait, and chooses who gives up its blocks when none are free: the
    last in rank. ``displaces`` says who gives way even before that. With ``shares_service`` ranks
    order the requests of one client only, see octavo.runtime.fair_queue."""

    heeds_priority: bool
    has_displacement: bool
    shares_service: bool

    def rank(self, request: Request) -> Rank: ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether a request may take the place of another that runs. No chain of displacements
        comes back to where it began, since each goes up in rank."""
        ...


class FirstCome:
    """In the order of arrival. Nobody overtakes, so nobody starves."""

    heeds_priority = has_displacement = shares_service = False

    def rank(self, request: Request) -> Rank:
        return (0.0, 0.0, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return False


class FairShare(FirstCome):
    """The client that was served least first; within one client in the order of arrival."""

    shares_service = True


@dataclass(frozen=True)
class ByPriority:
    """The most urgent priority first, and within one the earliest deadline; the rest as they came.

    One that waited for the ageing time counts as one priority more urgent. So a request of priority
    p is overtaken only by such of priority q as arrive within (p - q) ageing times after it; by
    such as have a deadline, within (p - q + 1).
    """

    ageing_seconds: float
    heeds_priority = has_displacement = True
    shares_service = False

    def rank(self, request: Request) -> Rank:
        due = min(request.deadline, request.arrival_time + self.ageing_seconds)
        return (due + self.ageing_seconds * request.priority, request.deadline, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and waiting.rank < running.rank


@dataclass(frozen=True)
class EarliestDeadline:
    """The earliest deadline first; among equal ones the more urgent priority.

    Who has none, or a later one, counts as due an ageing time after its arrival. So a request is
    overtaken only by such as arrive within one ageing time after it.
    """

    ageing_seconds: float
    heeds_priority = has_displacement = True
    shares_service = False

    def rank(self, request: Request) -> Rank:
        due = min(request.deadline, request.arrival_time + self.ageing_seconds)
        return (due, float(request.priority), request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.rank[0] < running.rank[0]


@dataclass(frozen=True)
class ShortestFirst:
    """The least estimated work first: see ``estimated_steps``. Who runs is left to finish.

    A thousand steps count as much as having arrived an ageing time later. So a request of s steps
    is overtaken only by such as arrive within s / 1000 ageing times after it.
    """

    ageing_seconds: float
    heeds_priority = has_displacement = shares_service = False

    def rank(self, request: Request) -> Rank:
        handicap = estimated_steps(request) * self.ageing_seconds / STEPS_AN_AGE
        return (request.arrival_time + handicap, 0.0, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return False


def estimated_steps(request: Request) -> float:
    """Decode steps that a request is worth at most: all that it may write, and its prompt."""
    num_new = request.max_total_tokens - request.num_prompt_tokens
    return num_new + request.num_prompt_tokens / PROMPT_TOKENS_A_STEP


POLICIES = ("fcfs", "priority", "edf", "shortest", "fair")


def make_policy(name: str, ageing_seconds: float) -> Policy:
    """The policy of a name in ``POLICIES``."""
    if name in ("fcfs", "fair"):
        return FirstCome() if name == "fcfs" else FairShare()
    kinds: dict[str, Callable[[float], Policy]] = {
        "priority": ByPriority,
        "edf": EarliestDeadline,
        "shortest": ShortestFirst,
    }
    return kinds[name](ageing_seconds)
