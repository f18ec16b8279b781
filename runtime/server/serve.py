"""Runs the application under uvicorn until it is told to stop, and then drains."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.errors import InvalidRequest

logger = logging.getLogger("octavo.server")

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
_CLOSE_SECONDS = 5  # for answers that are finished to reach their clients


@dataclass(frozen=True)
class ListenOptions:
    """Where to listen, with TLS if both files are given, and how long to drain."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    drain_timeout: float = 60.0


class _Server(uvicorn.Server):
    """Drains at the first signal, stops at the second. ``was_cut`` says that requests were lost."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM, drain_timeout: float) -> None:
        super().__init__(config)
        self.was_cut = False
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1 or self._loop is None:
            self.was_cut = self._engine.num_requests > 0
            self.should_exit = self.force_exit = True
            self.config.timeout_graceful_shutdown = 0
        else:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        logger.warning(
            "draining: %d requests have %g s to finish; a second signal stops at once",
            self._engine.num_requests,
            self._drain_timeout,
        )
        if not await self._engine.drain(self._drain_timeout):
            self.was_cut = True
            logger.error("%d requests did not finish in time", self._engine.num_requests)
            self._engine.abort_all()  # so that their clients are told
            await self._engine.drain(_CLOSE_SECONDS)
        self.should_exit = True


def run_server(app: FastAPI, engine: AsyncLLM, options: ListenOptions) -> bool:
    """Serve until a signal; False when requests were cut off. The engine is the caller's to end."""
    listener = open_listener(options)
    config = uvicorn_config(app, options)
    server = _Server(config, engine, options.drain_timeout)
    try:
        config.load()
        logger.warning("listening on %s", address_of(listener, config.is_ssl))
        server.run([listener])
    finally:
        listener.close()
    return not server.was_cut


def uvicorn_config(app: FastAPI, options: ListenOptions) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http="httptools" if importlib.util.find_spec("httptools") else "h11",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        backlog=_BACKLOG,
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )


def open_listener(options: ListenOptions) -> socket.socket:
    """A listening socket. Raises OSError, or InvalidRequest for TLS files that cannot be used."""
    check_tls(options)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        error.filename = f"{options.host}:{options.port}"
        raise


def check_tls(options: ListenOptions) -> None:
    """Refuse half of a pair, and files that are not there."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise InvalidRequest("TLS needs both --tls-certificate and --tls-key")
    for path in (options.tls_certificate, options.tls_key):
        if path is not None and not os.access(path, os.R_OK):
            raise InvalidRequest(f"{path}: the TLS file cannot be read")


def address_of(listener: socket.socket, is_tls: bool) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{host}:{port}"
