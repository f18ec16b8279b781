"""AsyncLLM: requests from an event loop, steps in a thread of their own."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch

from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import (
    EngineDeadError,
    EngineError,
    EngineStopped,
    InvalidRequest,
    QueueFull,
)
from octavo.runtime.llm import LLM
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.memory_plan import MemoryUse
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import EngineStats, RequestOutput
from octavo.runtime.prompts import Prompt
from octavo.runtime.request_stream import RequestStream
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.validation import integer

logger = logging.getLogger(__name__)

DEFAULT_MAX_QUEUED_REQUESTS = 1024
_NUM_AVERAGED = 16
_DEAD = "the engine is dead, start its process again: {}"
_STOPPED = "the engine is shutting down and takes no more requests"
_T = TypeVar("_T")


class AsyncLLM:
    """A compiled model that serves an event loop. The names are vLLM's.

    A thread of its own runs the engine's steps; other threads tokenise; what a step gives is handed
    to the event loop at once. Taken are at most ``max_requests`` at a time: the ``max_num_seqs``
    that may run, and ``max_queued_requests`` more. One beyond them raises QueueFull. Methods belong
    to one event loop, but ``stats`` and ``abort`` to any thread.
    """

    llm_class: type[LLM] = LLM

    def __init__(
        self,
        model: str | Path,
        *,
        max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
        **keywords: Any,
    ) -> None:
        """``keywords`` as for LLM. Raises what LLM raises."""
        self.max_queued_requests = integer("max_queued_requests", max_queued_requests, low=0)
        self._llm = self.llm_class(model, **keywords)
        self._engine = self._llm.engine
        self.max_requests = self._engine.scheduler.config.max_num_seqs + self.max_queued_requests
        self._streams: dict[str, RequestStream] = {}  # every request that was taken
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._error: Exception | None = None  # why the engine is dead
        self._mean_seconds = 0.0  # from a request's arrival to its end, of the latest ones
        self._is_draining = False
        self._is_stopping = False
        self._drained: list[asyncio.Event] = []
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "octavo-tokenise")
        self._thread = Thread(target=self._run, name="octavo-steps", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)  # a step that runs while Python ends may crash it

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **arrival: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request. Closing the generator, or cancelling its task, ends it.

        ``prompt`` is one of the shapes that LLM.generate takes. ``output_kind``: "cumulative" gives
        all there is each time, "delta" what is new, "final" one output at the end. Raises what
        ``add_request`` raises, and EngineError when a step with the request in it fails.
        """
        stream = await self.add_request(
            request_id, prompt, sampling_params, output_kind=output_kind, **arrival
        )
        async with stream:
            async for output in stream:
                yield output

    async def add_request(
        self,
        request_id: str | None,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **arrival: Any,
    ) -> RequestStream:
        """Take a request; the engine has it in its queue when this returns.

        ``arrival`` goes to Engine.add_request. Raises InvalidRequest, QueueFull, EngineStopped or
        EngineDeadError; then nothing is left of the request.
        """
        arrival = {"arrival_time": time.monotonic(), **arrival}
        self._check_taking()
        prepared, params = await self.offload(self._llm.prepare, prompt, sampling_params)
        self._check_taking()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if request_id in self._streams:
            raise InvalidRequest(f"request id {request_id!r} is in use; give another")
        stream = RequestStream(request_id, output_kind, self._abandon)
        is_taken = stream.loop.create_future()
        self._streams[request_id] = stream
        self._commands.put(lambda: self._add(stream, prepared, params, arrival, is_taken))
        try:
            await is_taken
        except BaseException:
            stream.close()
            raise
        return stream

    async def prepare_chat(self, messages: Sequence[Mapping[str, Any]], **rendering: Any) -> Prompt:
        """A conversation as a prompt for ``generate``; ``rendering`` as for LLM.chat."""
        return await self.offload(self._llm.prepare_chat, messages, **rendering)

    async def offload(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Run a function in the threads that tokenise, so that neither loop nor engine waits."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*arguments, **named))

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests before the next step; whoever reads them gets "abort" as finish reason."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self._commands.put(lambda each=each: self._abort(each))  # type: ignore[misc]

    def abort_all(self) -> None:
        """The same for every request that was taken."""
        self.abort(list(self._streams))

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those there are; False when the time was too short.

        ``timeout`` is in seconds.
        """
        self._is_draining = True
        if not self._streams:
            return True
        drained = asyncio.Event()
        self._drained.append(drained)
        try:
            await asyncio.wait_for(drained.wait(), timeout)
        except TimeoutError:
            return False
        finally:
            self._drained.remove(drained)
        return True

    def shutdown(self) -> None:
        """End all requests and the thread. Waits for the step that runs."""
        atexit.unregister(self.shutdown)
        self._is_draining = self._is_stopping = True
        self._commands.put(lambda: None)
        self._thread.join()
        self._pool.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: alive, not draining, not shut down."""
        return self._error is None and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_requests(self) -> int:
        """Requests that were taken and are not finished."""
        return len(self._streams)

    @property
    def expected_wait_seconds(self) -> float:
        """About how long it takes until a request ends and makes room for another."""
        return self._mean_seconds / max(1, self._engine.scheduler.config.max_num_seqs)

    async def check_health(self) -> None:
        """Raises EngineDeadError when no step can run any more."""
        self._check_alive()

    def stats(self) -> EngineStats:
        """As LLM.stats. Any thread."""
        return self._llm.stats()

    def get_tokenizer(self) -> Tokenizer:
        """As LLM.get_tokenizer."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """As LLM.get_default_sampling_params."""
        return self._llm.get_default_sampling_params()

    @property
    def artifact(self) -> Artifact:
        return self._llm.artifact

    @property
    def options(self) -> LLMOptions:
        return self._llm.options

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request, prompt and output."""
        return self._engine.max_model_len

    @property
    def load_times(self) -> dict[str, float]:
        """Seconds of each phase of the load."""
        return self._llm.load_times

    def memory_bytes(self) -> dict[str, int]:
        """The GPU's memory by what it is for; empty on a CPU. ``used`` is what the load took."""
        memory: MemoryUse | None = getattr(self._engine.executor, "memory", None)
        if memory is None:
            return {}
        parts = dataclasses.asdict(memory.plan)
        del parts["pinned"]  # the host's
        return {**parts, "used": memory.used}

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(_DEAD.format(self._error))

    def _check_taking(self) -> None:
        self._check_alive()
        if self._is_draining:
            raise EngineStopped(_STOPPED)
        if len(self._streams) >= self.max_requests:
            raise QueueFull(
                f"{len(self._streams)} requests run or wait, which is the most that are taken "
                f"(max_queued_requests={self.max_queued_requests}); send it again later"
            )

    def _abandon(self, stream: RequestStream) -> None:
        """Nobody reads this stream any more."""
        self._commands.put(lambda: self._end_abandoned(stream))

    # What follows runs in the thread of the steps, and nothing else touches the engine.

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._take_commands(is_waiting=not self._engine.has_unfinished_requests())
                if self._engine.has_unfinished_requests() and not self._is_stopping:
                    self._step()
            except Exception as error:
                logger.exception("the engine is dead")
                self._die(error)
        for request_id in list(self._streams):
            self._abort(request_id)
        self._take_commands(is_waiting=False)

    def _take_commands(self, is_waiting: bool) -> None:
        if is_waiting:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineError as error:
            logger.error("%s", error)
            if not self._is_device_alive():
                raise
            streams = list(self._streams.items())  # the event loop may add to it meanwhile
            is_live = self._engine.is_live
            self._fail([i for i, each in streams if each.is_queued and not is_live(i)], error)
        else:
            self._deliver((output.request_id, output) for output in outputs)

    def _is_device_alive(self) -> bool:
        """Whether steps may go on after one that failed: most faults of a GPU end all its work."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _die(self, error: Exception) -> None:
        self._error = error
        self._fail(list(self._streams), EngineDeadError(_DEAD.format(error)))
        while not self._is_stopping:
            self._commands.get()()

    def _add(
        self,
        stream: RequestStream,
        prompt: Prompt,
        params: SamplingParams,
        arrival: Mapping[str, Any],
        is_taken: asyncio.Future[None],
    ) -> None:
        error: Exception | None = None
        try:
            self._check_alive()
            if self._is_stopping:
                raise EngineStopped(_STOPPED)
            self._llm.submit(stream.request_id, prompt, params, stream.kind, **arrival)
            stream.is_queued = True
        except Exception as refusal:
            error = refusal
            self._streams.pop(stream.request_id, None)
        _call_in(stream.loop, _settle, is_taken, error)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort_request(request_id) if self._error is None else None
        if output is not None:
            self._deliver([(request_id, output)])

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        self._deliver((request_id, error) for request_id in request_ids)

    def _end_abandoned(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            if self._error is None:
                self._engine.abort_request(stream.request_id)
            _call_in(stream.loop, self._wake, ())

    def _deliver(self, items: Iterable[tuple[str, RequestOutput | Exception]]) -> None:
        """Hand outputs, and what ends a request, to the streams; one wake-up an event loop."""
        touched: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for request_id, item in items:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.put(item)
            if isinstance(item, Exception) or item.finished:
                del self._streams[request_id]
                self._count_seconds(item)
            touched.setdefault(stream.loop, []).append(stream)
        for loop, streams in touched.items():
            if not _call_in(loop, self._wake, streams):
                for stream in streams:
                    self._end_abandoned(stream)

    def _count_seconds(self, last: RequestOutput | Exception) -> None:
        metrics = None if isinstance(last, Exception) else last.metrics
        if metrics is not None and metrics.finished_time is not None:
            seconds = metrics.finished_time - metrics.arrival_time
            self._mean_seconds += (seconds - self._mean_seconds) / _NUM_AVERAGED

    # And this in the event loop.

    def _wake(self, streams: Iterable[RequestStream]) -> None:
        for stream in streams:
            stream.wake()
        if not self._streams:
            for drained in self._drained:
                drained.set()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> bool:
    """Call a function in an event loop, from another thread; False when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _settle(is_taken: asyncio.Future[None], error: Exception | None) -> None:
    if is_taken.done():
        return  # its task was cancelled
    if error is None:
        is_taken.set_result(None)
    else:
        is_taken.set_exception(error)
