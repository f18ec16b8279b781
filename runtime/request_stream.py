"""The outputs of one request on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from types import TracebackType

from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import CompletionOutput, RequestOutput


class RequestStream:
    """An asynchronous iterator over what the engine says of one request.

    What came since the consumer last looked is given as one output, so that a slow consumer costs
    no more than its text. Iterating raises what ended the request when that was no output.
    Leaving the ``async with`` block, or ``close``, ends a request that is not finished.
    """

    def __init__(
        self, request_id: str, kind: OutputKind, abandon: Callable[[RequestStream], None]
    ) -> None:
        """Made in the event loop that consumes it. ``abandon`` is told of an early close."""
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.is_queued = False  # the engine knows it
        self.kind = kind
        self._abandon = abandon
        self._arrived: deque[RequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def put(self, item: RequestOutput | Exception) -> None:
        """Add an output, or what ends the stream. Any thread; ``wake`` is then due in the loop."""
        self._arrived.append(item)

    def wake(self) -> None:
        """Let the consumer look. In the stream's loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Take no more: ends the request unless it is finished. In the stream's loop."""
        if not self._is_over:
            self._is_over = True
            self._abandon(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        while not self._arrived:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> RequestOutput:
        item = self._arrived.popleft()
        if isinstance(item, Exception):
            self._is_over = True
            raise item
        while self._arrived and isinstance(self._arrived[0], RequestOutput):
            item = join_outputs(item, self._arrived.popleft(), self.kind)
        self._is_over = item.finished
        return item


def join_outputs(
    first: RequestOutput, second: RequestOutput | Exception, kind: OutputKind
) -> RequestOutput:
    """Two outputs of a request as one; each may speak of some of its continuations only."""
    assert isinstance(second, RequestOutput)
    by_index = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        before = by_index.get(completion.index)
        if before is not None and kind == "delta":
            completion = _join_deltas(before, completion)
        by_index[completion.index] = completion
    # What was said once is not said again, such as the log-probabilities of the prompt.
    names = [field.name for field in fields(RequestOutput)]
    once = {name: getattr(first, name) for name in names if getattr(second, name) is None}
    return replace(second, **once, outputs=[by_index[index] for index in sorted(by_index)])


def _join_deltas(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if first.logprobs is not None and logprobs is not None:
        logprobs = first.logprobs + logprobs
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
    )
