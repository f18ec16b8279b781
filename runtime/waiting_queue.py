"""Requests that wait, in the order of their ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

from octavo.runtime.request import Rank, Request


class WaitingQueue:
    """A heap: adding and taking one of n costs O(log n), removing O(1), amortised.

    A removed request's entry stays in the heap until it comes up, or until half of them are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """In order; it sorts, and is for looking only."""
        return iter(sorted(self._waiting.values(), key=lambda request: request.rank))

    def push(self, request: Request) -> None:
        """Add a request that does not wait yet, at its rank."""
        assert request.request_id not in self._waiting, "it waits already"
        if 2 * len(self._waiting) < len(self._heap):
            self._heap = [(waiting.rank, waiting) for waiting in self._waiting.values()]
            heapify(self._heap)
        self._waiting[request.request_id] = request
        heappush(self._heap, (request.rank, request))

    def peek(self) -> Request:
        """The first in rank. There must be one."""
        while self._heap[0][1] not in self:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the first in rank. There must be one."""
        request = self.peek()
        heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def ended(self, request: Request) -> None:
        """Told of each request that was taken and runs no more."""

    def check(self, running: Collection[str]) -> None:
        """Raise InvariantError when what is known of those that ``running`` names is wrong."""

    def remove(self, request: Request) -> None:
        """Take a request out; nothing when it does not wait."""
        if request in self:
            del self._waiting[request.request_id]
