"""Requests that wait, taken so that clients share the engine.

The virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):
next comes the client that has been served least, by the tokens that were computed for it. One that
comes back after a pause is served no less than those that wait, so that nobody saves up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from octavo.runtime.errors import require
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.waiting_queue import WaitingQueue

_MANY_CLIENTS = 1000


@dataclass(frozen=True)
class _Run:
    """A request since it was taken. What it computes again after a preemption is not its fault."""

    request: Request
    prompt_work: float
    num_output_tokens: int

    @property
    def work(self) -> float:
        """What was done for its client, in decode steps."""
        return self.prompt_work + self.request.num_output_tokens - self.num_output_tokens


class FairQueue(WaitingQueue):
    """A queue for each client, within which the order is that of the ranks.

    Looking at the first costs O(clients that wait + requests that run).
    """

    def __init__(self, prompt_tokens_a_step: int) -> None:
        """So many tokens of a prompt count as much as one of an answer."""
        super().__init__()
        self._prompt_tokens_a_step = prompt_tokens_a_step
        self._queues: dict[str, WaitingQueue] = {}  # of clients that wait
        self._runs: dict[str, dict[str, _Run]] = {}  # of clients that run something
        self._served: dict[str, float] = {}  # before what runs
        self._floor = 0.0  # of whoever was taken last
        self._most_clients = _MANY_CLIENTS  # whose counts are kept before some are forgotten

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.client)
        return queue is not None and request in queue

    def __iter__(self) -> Iterator[Request]:
        """In the order of arrival."""
        everybody = (request for queue in self._queues.values() for request in queue)
        return iter(sorted(everybody, key=lambda request: request.rank))

    def push(self, request: Request) -> None:
        client = request.client
        run = self._runs.get(client, {}).get(request.request_id)
        if run is not None:
            # It was put off before it ran at all, or has given way.
            is_unserved = request.status is RequestStatus.WAITING
            self._end(run, 0.0 if is_unserved else run.work)
        elif client not in self._queues:
            self._lift(client)
        self._queues.setdefault(client, WaitingQueue()).push(request)

    def peek(self) -> Request:
        return self._queues[self._next_client()].peek()

    def pop(self) -> Request:
        client = self._next_client()
        request = self._queues[client].pop()
        self._drop_if_empty(client)
        is_new = request.status is RequestStatus.WAITING
        prompt_work = request.num_prompt_tokens / self._prompt_tokens_a_step if is_new else 0.0
        run = _Run(request, prompt_work, request.num_output_tokens)
        self._runs.setdefault(client, {})[request.request_id] = run
        self._floor = self._service(client)
        return request

    def remove(self, request: Request) -> None:
        if request in self:
            self._queues[request.client].remove(request)
            self._drop_if_empty(request.client)

    def ended(self, request: Request) -> None:
        run = self._runs.get(request.client, {}).get(request.request_id)
        if run is not None:
            self._end(run, run.work)

    def check(self, running: Collection[str]) -> None:
        taken = {name for runs in self._runs.values() for name in runs}
        require(taken == set(running), "those that are counted as running are not those that run")
        require(all(self._queues.values()), "a client waits with nothing")

    def _end(self, run: _Run, work: float) -> None:
        client = run.request.client
        self._served[client] = self._served.get(client, 0.0) + work
        runs = self._runs[client]
        del runs[run.request.request_id]
        if not runs:
            del self._runs[client]

    def _service(self, client: str) -> float:
        running = sum(run.work for run in self._runs.get(client, {}).values())
        return self._served.get(client, 0.0) + running

    def _next_client(self) -> str:
        queues = self._queues
        return min(queues, key=lambda client: (self._service(client), queues[client].peek().rank))

    def _lift(self, client: str) -> None:
        """Count a client that begins to wait as served no less than those that wait."""
        if not self._queues and not self._runs:
            self._served.clear()  # nobody has anything that another could want
            self._floor = 0.0
        floor = min(map(self._service, self._queues), default=self._floor)
        missing = floor - self._service(client)
        if missing > 0:
            self._served[client] = self._served.get(client, 0.0) + missing
        if len(self._served) > self._most_clients:
            self._forget(floor)

    def _forget(self, floor: float) -> None:
        """Drop the counts of clients that would be lifted beyond them when they come back."""
        kept = self._queues.keys() | self._runs.keys()
        self._served = {c: s for c, s in self._served.items() if c in kept or s > floor}
        self._most_clients = max(_MANY_CLIENTS, 2 * len(self._served))

    def _drop_if_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]
