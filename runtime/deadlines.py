"""Who has run out of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from octavo.runtime.request import Request, RequestStatus

Reason = Literal["deadline", "queue_timeout"]
_STEPS_REMEMBERED = 64
_LEAST_PRUNED = 128


class Expired(NamedTuple):
    """A request that is to end, and the finish reason that it is to give."""

    request: Request
    reason: Reason


class Deadlines:
    """Watches the deadlines of requests, and how fast steps can be.

    ``step_seconds`` is the shortest of the last steps: no request is given up that a run of such
    steps would still bring to its end in time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expired]] = []
        self._prune_at = _LEAST_PRUNED
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def watch(self, request: Request) -> None:
        """Remember a request that has just arrived."""
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if _is_due_to_end(entry[2])]
            heapify(self._heap)
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._heap))
        if request.deadline < math.inf:
            entry = Expired(request, "deadline")
            heappush(self._heap, (request.deadline, 2 * request.order, entry))
        if request.queue_deadline < math.inf:
            entry = Expired(request, "queue_timeout")
            heappush(self._heap, (request.queue_deadline, 2 * request.order + 1, entry))

    def observe_step(self, seconds: float) -> None:
        """Tell how long a step took."""
        self._steps.append(seconds)

    @property
    def step_seconds(self) -> float:
        return min(self._steps, default=0.0)

    def expired(self, now: float) -> Iterator[Expired]:
        """Requests whose time has come and that have not ended, each once."""
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)[2]
            if _is_due_to_end(entry):
                yield entry

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a request could not meet its deadline if it ran from now on."""
        if request.deadline == math.inf:
            return False
        return now + request.min_new_tokens * self.step_seconds > request.deadline


def _is_due_to_end(entry: Expired) -> bool:
    """Whether a request would end if its time had come: it has not yet, nor been started if that
    was what it had to be in time."""
    status = entry.request.status
    if entry.reason == "queue_timeout":
        return status is RequestStatus.WAITING
    return status is not RequestStatus.FINISHED
