"""Answers a batch file with the server's own endpoints, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.server.app import ServerOptions, create_app
from octavo.runtime.server.batch_file import BatchRequest, answer_line, read_requests
from octavo.runtime.server.context import new_id

_TOO_MANY = 429  # a line may hold more prompts than there is room for beside the others'
_RETRY_SECONDS = 0.05
_UNAVAILABLE = 503  # the engine stops: whoever resumes asks again


async def run_batch(
    engine: AsyncLLM,
    options: ServerOptions,
    requests: Iterable[BatchRequest],
    output: Path,
    advance: Callable[[], None],
) -> int:
    """Answer requests and append the answers to a file, in the order in which they are done.

    ``advance`` is called for each. Returns how many were answered with an error. What was not
    answered because the engine died is not written, and raises EngineDeadError.
    """
    app = create_app(engine, options)
    waiting = iter(requests)
    one_by_one = asyncio.Lock()
    others = _Others()
    num_errors = 0
    with output.open("a", encoding="utf-8") as file:

        async def worker() -> None:
            nonlocal num_errors
            for request in waiting:
                with others:
                    status, body = await _answer(app, request)
                if status == _TOO_MANY:
                    async with one_by_one:
                        status, body = await _answer_in_turn(app, engine, others, request)
                if status == _UNAVAILABLE:
                    await engine.check_health()
                    return
                num_errors += status != 200
                file.write(answer_line(request.custom_id, new_id("batch_req"), status, body))
                file.flush()
                advance()

        # Enough to fill the steps and to have the next ones tokenised.
        async with asyncio.TaskGroup() as tasks:
            for _ in range(engine.max_requests):
                tasks.create_task(worker())
    return num_errors


def unanswered(path: Path, finished: set[str]) -> list[BatchRequest]:
    """The requests of an input file that are not answered yet. Raises InvalidRequest."""
    return [each for each in read_requests(path) if each.custom_id not in finished]


class _Others:
    """How many lines are being asked for, and how many have been begun in all."""

    def __init__(self) -> None:
        self.num_active = 0
        self.num_begun = 0

    def __enter__(self) -> None:
        self.num_active += 1
        self.num_begun += 1

    def __exit__(self, *exception: object) -> None:
        self.num_active -= 1


async def _answer_in_turn(
    app: ASGIApp, engine: AsyncLLM, others: _Others, request: BatchRequest
) -> tuple[int, Any]:
    """Ask until there is room, or until there is none though nobody else was there meanwhile."""
    while True:
        # Requests of an attempt that failed half-way are ended by the next step only.
        is_alone = others.num_active == 0 and engine.num_requests == 0
        num_begun = others.num_begun
        status, body = await _answer(app, request)
        if status != _TOO_MANY or (is_alone and others.num_begun == num_begun):
            return status, body
        await asyncio.sleep(_RETRY_SECONDS)


async def _answer(app: ASGIApp, request: BatchRequest) -> tuple[int, Any]:
    """The status and the body with which the application answers."""
    content = json.dumps(request.body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    is_read = False
    status = 500
    pieces: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Future()  # this client never goes
        is_read = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(b"".join(pieces))
