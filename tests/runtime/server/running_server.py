"""A server in a thread of the test, so that it can look into the engine; or in a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn
from command_line import OCTAVO, ROOT

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.server.app import ServerOptions, create_app
from octavo.runtime.server.serve import ListenOptions, address_of, open_listener

_LISTENING = re.compile(r"listening on (\S+)")


@dataclass
class Client:
    """How to reach a server."""

    url: str

    def openai(self, **options: Any) -> openai.OpenAI:
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def http(self, **options: Any) -> httpx2.Client:
        # Without the certificates, which take longer to read than a request.
        return httpx2.Client(base_url=self.url, timeout=60, verify=False, **options)


@dataclass
class InThread(Client):
    engine: AsyncLLM

    def wait_until_idle(self) -> None:
        """Until the engine holds no request and no block."""
        wait_until(lambda: self.engine.num_requests == 0)
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_total_blocks


@dataclass
class Process(Client):
    process: subprocess.Popen[str]
    log: list[str]  # grows

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)


def wait_until(condition: Callable[[], bool], timeout: float = 30) -> None:
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


@contextmanager
def in_thread(folder: Path, engine_options: Any = None, **options: Any) -> Iterator[InThread]:
    """Serve an artifact; ``options`` are those of ServerOptions."""
    engine = AsyncLLM(folder, **(engine_options or {}))
    app = create_app(engine, ServerOptions(**{"model_names": ("toy",), **options}))
    listener = open_listener(ListenOptions(port=0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield InThread(address_of(listener, is_tls=False), engine)
    finally:
        server.should_exit = True
        thread.join()
        engine.shutdown()


@contextmanager
def in_process(folder: Path, *arguments: str, **environment: str) -> Iterator[Process]:
    """``octavo serve`` in a process of its own."""
    command = [*OCTAVO, "serve", str(folder), "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    log: list[str] = []
    stderr = process.stderr
    assert stderr is not None
    reader = threading.Thread(target=lambda: log.extend(iter(stderr.readline, "")))
    reader.start()

    def found() -> str | None:
        matches = (_LISTENING.search(line) for line in list(log))
        return next((match[1] for match in matches if match), None)

    try:
        wait_until(lambda: found() is not None or process.poll() is not None, timeout=60)
        url = found()
        assert url is not None, "".join(log)
        yield Process(url, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join()
        stderr.close()
