"""What happens to every request before and after its endpoint. Plain ASGI: no cost a chunk."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.runtime.server.api_errors import ApiError, api_error_of, too_many

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("octavo.access")

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/metrics"))
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_CLIENTS = 10_000


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


class AccessLog:
    """Gives each request an id, and writes one line when it is answered.

    The id is the client's ``X-Request-Id`` when it sends one, and is sent back. Prompts are written
    only with ``with_prompts``. What nobody expected is answered here with 500, so that the line
    and the count say so, and its traceback is logged once.
    """

    def __init__(
        self, app: ASGIApp, *, count: Callable[[str, int], None], with_prompts: bool = False
    ) -> None:
        """``count`` is told the path and the status of each answer."""
        self._app = app
        self._count = count
        self._with_prompts = with_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        facts: dict[str, Any] = scope.setdefault("octavo.log", {})
        scope["octavo.send"] = send  # for bodies, see EventStream
        started = time.monotonic()
        status = 499  # what proxies write when the client is gone
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status = message["status"]
                has_begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(api_error_of(error))(scope, receive, send_with_id)
        finally:
            self._count(scope["path"], status)
            if access_logger.isEnabledFor(logging.INFO):
                milliseconds = (time.monotonic() - started) * 1e3
                access_logger.info("%s", self._line(scope, request_id, status, milliseconds, facts))

    def _line(
        self,
        scope: Scope,
        request_id: str,
        status: int,
        milliseconds: float,
        facts: dict[str, Any],
    ) -> str:
        client = scope.get("client")
        fields = {
            "request_id": request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(milliseconds, 1),
            **{key: value for key, value in facts.items() if key != "prompt"},
        }
        if self._with_prompts and "prompt" in facts:
            fields["prompt"] = facts["prompt"]
        return json.dumps(fields, ensure_ascii=False)


class Authentication:
    """Lets through requests with one of the keys, ``Authorization: Bearer KEY``.

    The comparison takes the same time for every wrong key. Open paths need none.
    """

    def __init__(self, app: ASGIApp, *, keys: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or scope["method"] == "OPTIONS" or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        digest = _digest(_bearer_key(headers))
        # All of them, also after a hit: when the answer comes tells nothing.
        hits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(hits)


def _bearer_key(headers: Headers) -> str:
    """What is sent as a key, however it is written; empty when there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def client_of(scope: Scope, uses_keys: bool) -> str:
    """Who asks: the API key, or the address where there are none; empty when that is not known."""
    if uses_keys:
        return _bearer_key(Headers(scope=scope))
    client: Sequence[Any] | None = scope.get("client")
    return str(client[0]) if client else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies above a size with 413, before they are read as far as that is possible."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                # One that FastAPI, which reads the body, lets through.
                raise HTTPException(413, str(self._error()))
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the request is larger than the {self._max_bytes} bytes that are taken; "
            "--max-request-bytes sets it",
            code="request_too_large",
        )


class RateLimit:
    """At most ``per_minute`` requests a minute from each API key, or address where there is none.

    A token bucket: a client that was quiet may send that many at once.
    """

    def __init__(self, app: ASGIApp, *, per_minute: int, uses_keys: bool) -> None:
        self._app = app
        self._per_minute = per_minute
        self._uses_keys = uses_keys
        # client -> (requests it may send, at which time); the least recently seen first
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            wait = self._take(client_of(scope, self._uses_keys), time.monotonic())
            if wait > 0:
                error = too_many(f"more than {self._per_minute} requests a minute; slow down", wait)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _take(self, client: str, now: float) -> float:
        """Count a request; the seconds to wait when it is one too many, else 0."""
        rate = self._per_minute / 60
        tokens, last = self._buckets.pop(client, (float(self._per_minute), now))
        tokens = min(float(self._per_minute), tokens + (now - last) * rate)
        is_taken = tokens >= 1
        self._buckets[client] = (tokens - 1 if is_taken else tokens, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if is_taken else (1 - tokens) / rate
