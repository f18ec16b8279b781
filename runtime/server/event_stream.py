"""Server-sent events, and answers that end with their client's connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from json.encoder import encode_basestring
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.runtime.server.api_errors import ApiError, ClientDisconnected

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
_MARK = "\0"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work; it is cancelled, and ClientDisconnected raised, if the client goes.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    """One event with JSON in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class TextEvent:
    """Events that differ in one text only, which is all that is written anew for each.

    ``chunk`` makes the data of one from its text, to which nothing but the text may be due.
    """

    def __init__(self, chunk: Callable[[str], Any]) -> None:
        # What stands before the text may be a client's; what stands after it is ours.
        head, _, tail = event(chunk(_MARK)).rpartition(encode_basestring(_MARK).encode())
        self._head, self._tail = head, tail

    def render(self, text: str) -> bytes:
        """The event with this text."""
        return b"%b%b%b" % (self._head, encode_basestring(text).encode(), self._tail)


class EventStream(Response):
    """Streams events as they come, then ``[DONE]``.

    The status is sent with the first event: what goes wrong before is raised, and answered with a
    status of its own. What goes wrong later becomes an event with an error in it.

    Events go straight to the server where the outermost middleware has left its ``send`` in the
    scope: those between only look at how an answer starts, at the cost of a coroutine each.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        explain: Callable[[Exception], ApiError],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to be told that nobody is left; the response may have begun, too.
        with suppress(ClientDisconnected):
            await unless_disconnected(receive, self._send(send, scope.get("octavo.send", send)))

    async def _send(self, send: Send, send_body: Send) -> None:
        async with aclosing(self._events) as events:
            data = await anext(events)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send_body(_body(data))
            try:
                async for data in events:
                    await send_body(_body(data))
            except Exception as error:
                await send_body(_body(event(self._explain(error).body)))
        await send({"type": "http.response.body", "body": DONE})


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
