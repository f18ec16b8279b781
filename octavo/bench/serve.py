"""What the server costs for each streamed token, with a model that costs nothing.

The server is the real one, the engine too; only the executor is replaced by one whose steps take a
given time and no work. The clients are another process. So all processor time of this process that
is not the engine's is the server's: taking outputs from the engine's thread, waking the event loop,
writing events, and starting the requests, whose share sinks with the length of the answers.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import uvicorn

from octavo.bench import stream_clients
from octavo.bench.report import Grid
from octavo.ir.errors import OctavoError
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.batch import Batch
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampler import SampledToken, SampleRow
from octavo.runtime.server.app import ServerOptions, create_app
from octavo.runtime.server.serve import ListenOptions, open_listener, uvicorn_config

_TEXT = "A sheet that is folded three times makes eight leaves, which printers call an octavo. "
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me a story."}]},
}


@dataclass(frozen=True)
class ServerCost:
    """Microseconds of one core for each streamed token.

    ``server_us`` is the server's, the hand-over in the engine's thread included; ``engine_us`` that
    of the rest of the engine's thread: planning, detokenising, making outputs.
    """

    path: str
    num_streams: int
    num_tokens: int
    num_events: int
    server_us: float
    engine_us: float


class _FreeStep:
    def __init__(self, tokens: list[SampledToken], is_due: float) -> None:
        self._tokens = tokens
        self._is_due = is_due

    def result(self) -> list[SampledToken]:
        time.sleep(max(0.0, self._is_due - time.monotonic()))
        return self._tokens


class FreeExecutor:
    """Samples the ids of a text in turn. A step takes ``step_seconds``, and next to no work."""

    def __init__(self, token_ids: Sequence[int], step_seconds: float) -> None:
        self.num_launched_tokens = 0
        self.thread_seconds = 0.0  # of the engine's thread so far
        self._tokens = cycle([SampledToken(token_id) for token_id in token_ids])
        self._step_seconds = step_seconds

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> _FreeStep:
        self.num_launched_tokens = len(batch.ids)
        self.thread_seconds = time.thread_time()
        tokens = list(islice(self._tokens, len(rows)))
        return _FreeStep(tokens, time.monotonic() + self._step_seconds)


class _TimedLLM(AsyncLLM):
    """Takes the time of what the engine's thread does for the server."""

    delivery_seconds = 0.0

    def _deliver(self, items: Iterable[tuple[str, RequestOutput | Exception]]) -> None:
        start = time.thread_time()
        super()._deliver(items)
        self.delivery_seconds += time.thread_time() - start


class ServedModel:
    """A server over a free model, for as long as ``serving`` lasts."""

    def __init__(self, engine: _TimedLLM, executor: FreeExecutor, address: tuple[str, int]) -> None:
        self._engine = engine
        self._executor = executor
        self._address = address

    def measure(
        self, path: str, num_streams: int, num_tokens: int, *, repeats: int = 1
    ) -> ServerCost:
        """Stream ``num_tokens`` to each of some clients at once; the median of ``repeats``."""
        found = [self._measure(path, num_streams, num_tokens) for _ in range(repeats)]
        return sorted(found, key=lambda cost: cost.server_us)[repeats // 2]

    def _measure(self, path: str, num_streams: int, num_tokens: int) -> ServerCost:
        body = {
            **_BODIES[path],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        before, num_before = self._seconds(), self._engine.stats().output_tokens
        num_events = self._ask(path, num_streams, json.dumps(body))
        whole, thread, delivery = (b - a for a, b in zip(before, self._seconds(), strict=True))
        tokens = self._engine.stats().output_tokens - num_before
        if tokens != num_streams * num_tokens:
            raise OctavoError(
                f"{path}: {num_tokens} tokens a stream do not fit into the model's "
                f"{self._engine.max_model_len}; lower --output-len"
            )
        return ServerCost(
            path,
            num_streams,
            tokens,
            num_events,
            server_us=(whole - thread + delivery) / tokens * 1e6,
            engine_us=(thread - delivery) / tokens * 1e6,
        )

    def _ask(self, path: str, num_streams: int, body: str) -> int:
        host, port = self._address
        command = [sys.executable, stream_clients.__file__, host, str(port), path, str(num_streams)]
        done = subprocess.run(command, input=body, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise OctavoError(f"{path} was not measured: {reason[:500]}")
        return int(done.stdout)

    def _seconds(self) -> tuple[float, float, float]:
        """Processor time of the process, of the engine's thread, and of its deliveries."""
        return time.process_time(), self._executor.thread_seconds, self._engine.delivery_seconds


def measure_server(
    artifact: Path,
    streams: Sequence[int],
    *,
    num_tokens: int = 256,
    step_ms: float = 2.0,
    repeats: int = 3,
) -> list[ServerCost]:
    """Both endpoints with each number of streams; warmed up first."""
    costs = []
    with serving(artifact, num_streams=max(streams), step_ms=step_ms) as model:
        for path in _BODIES:
            model.measure(path, 1, 16)
            costs += [model.measure(path, n, num_tokens, repeats=repeats) for n in streams]
    return costs


@contextmanager
def serving(artifact: Path, *, num_streams: int, step_ms: float) -> Iterator[ServedModel]:
    """Serve an artifact's tokenizer and templates, without its weights, to so many clients."""
    executors: list[FreeExecutor] = []

    class FreeLLM(LLM):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            token_ids = self.get_tokenizer().encode(_TEXT, add_special_tokens=False)
            executors.append(FreeExecutor(token_ids, step_ms / 1e3))
            self.engine.executor = executors[0]

    class FreeAsyncLLM(_TimedLLM):
        llm_class = FreeLLM

    engine = FreeAsyncLLM(artifact, load_format="dummy", max_num_seqs=num_streams)
    listen = ListenOptions(port=0)
    listener = open_listener(listen)
    app = create_app(engine, ServerOptions(model_names=("free",)))
    server = uvicorn.Server(uvicorn_config(app, listen))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        _wait_until(lambda: server.started)
        yield ServedModel(engine, executors[0], listener.getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join()
        engine.shutdown()


def to_json(costs: Sequence[ServerCost]) -> str:
    """The figures, for another program."""
    return json.dumps([dataclasses.asdict(cost) for cost in costs], indent=2) + "\n"


def server_grid(costs: Sequence[ServerCost]) -> Grid:
    """A row for each measurement."""
    columns = ("path", "streams", "tokens", "events", "server us/token", "engine us/token")
    rows = [
        (
            each.path,
            f"{each.num_streams:,}",
            f"{each.num_tokens:,}",
            f"{each.num_events:,}",
            f"{each.server_us:.1f}",
            f"{each.engine_us:.1f}",
        )
        for each in costs
    ]
    return Grid("Processor time of a streamed token, the model's not counted", columns, rows)


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)
