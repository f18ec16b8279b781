"""Errors in OpenAI's shape, and which status each of ours has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.ir.errors import OctavoError
from octavo.runtime.errors import EngineDeadError, EngineStopped, InvalidRequest, QueueFull

# Reasons for which a request ends without the answer that was asked for: status, type, message.
_UNFINISHED = {
    "error": (500, "server_error", "the request failed: {}"),
    "abort": (503, "service_unavailable", "the request was ended by the server"),
    "deadline": (504, "timeout", "the request missed its deadline"),
    "queue_timeout": (504, "timeout", "the request waited longer than its queue_timeout_ms"),
}


class ApiError(Exception):
    """What a client is told: an HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class ClientDisconnected(Exception):
    """Nobody is there to answer any more."""


def too_many(message: str, retry_after_seconds: float) -> ApiError:
    """429, with the whole seconds after which to come again."""
    wait = max(1, -int(-retry_after_seconds // 1))
    return ApiError(
        429,
        message,
        "rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(wait)},
    )


def unfinished(reason: str | None, stop_reason: int | str | None) -> ApiError | None:
    """The error of a finish reason that stands for one."""
    if reason not in _UNFINISHED:
        return None
    status, kind, message = _UNFINISHED[reason]
    return ApiError(status, message.format(stop_reason), kind, code=reason)


def api_error_of(error: Exception, retry_after_seconds: float = 1.0) -> ApiError:
    """How an exception is told to a client. What is not ours to explain is an internal error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, QueueFull):
        return too_many(str(error), retry_after_seconds)
    if isinstance(error, (EngineStopped, EngineDeadError)):
        return ApiError(503, str(error), "service_unavailable")
    if isinstance(error, OctavoError):
        return ApiError(500, str(error), "server_error")
    return ApiError(500, "internal error; the server's log says more", "server_error")
