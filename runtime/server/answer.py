"""An answer on its way, whole or in events: what both endpoints that generate have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.api_errors import ApiError
from octavo.runtime.server.context import (
    ServerContext,
    StreamedUsage,
    Usage,
    finished,
    interleaved,
    note_usage,
    without_failure,
)
from octavo.runtime.server.event_stream import TextEvent, event
from octavo.runtime.server.protocol import SamplingRequest
from octavo.runtime.server.sampling import arrival_of


class Answer(ABC):
    """The answer to one request, which may have several prompts and choices.

    ``head`` are the fields that all chunks share. With ``is_plain`` a choice's chunks between its
    first and its last differ in nothing but their text, and only that is written anew for each.
    """

    def __init__(
        self,
        context: ServerContext,
        body: SamplingRequest,
        request: Request,
        params: SamplingParams,
        head: dict[str, Any],
        *,
        is_plain: bool,
    ) -> None:
        self._context = context
        self._request = request
        self._params = params
        self._head = head
        self._arrival = {**arrival_of(body), "client": context.client(request, body.user)}
        self._usage = Usage()
        self._streamed = StreamedUsage(body.stream_options, self._usage)
        self._is_plain = is_plain and not self._streamed.is_continuous
        self._text_events: dict[int, TextEvent] = {}  # of the choices that have begun

    async def whole(self) -> Response:
        """The answer in one piece."""
        async with self._context.submitted(
            await self._prompts(), self._params, "final", self._arrival
        ) as streams:
            outputs = [self._shown(output) for output in await finished(streams)]
        choices: list[dict[str, Any]] = []
        for number, output in enumerate(outputs):
            self._usage.count(number, output)
            choices += [self._whole_choice(number, output, each) for each in output.outputs]
        usage = self._usage.to_dict()
        note_usage(self._request, usage)
        answer = {**self._head, "choices": choices, "usage": usage, **self._whole_fields(outputs)}
        return JSONResponse(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in events: those that are due at once in one piece."""
        async with self._context.submitted(
            await self._prompts(), self._params, "delta", self._arrival
        ) as streams:
            numbers = {stream.request_id: number for number, stream in enumerate(streams)}
            async for output in interleaved(streams):
                shown = self._shown(output)
                events, error = self._events_of(numbers[output.request_id], shown)
                if events:
                    yield events
                if error is not None:
                    raise error
        usage = self._usage.to_dict()
        note_usage(self._request, usage)
        if self._streamed.is_wanted:
            yield event({**self._head, "choices": [], "usage": usage})

    @abstractmethod
    async def _prompts(self) -> list[Any]:
        """What AsyncLLM.add_request takes as prompts."""

    @abstractmethod
    def _whole_choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """A choice of the whole answer; ``number`` is the prompt's."""

    @abstractmethod
    def _deltas(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that an output of a continuation makes."""

    @abstractmethod
    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk that has text and nothing else."""

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """What is told of an output."""
        return output

    def _index(self, number: int, completion: CompletionOutput) -> int:
        """The index of a choice."""
        return number * self._params.n + completion.index

    def _whole_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """More fields of the whole answer."""
        return {}

    def _events_of(self, number: int, output: RequestOutput) -> tuple[bytes, ApiError | None]:
        """The events of an output, and the error with which the answer then ends."""
        self._usage.count(number, output)
        pieces: list[bytes] = []
        for delta in output.outputs:
            index = self._index(number, delta)
            text_event = self._text_events.get(index)
            if text_event is not None and delta.finish_reason is None:
                if delta.text:
                    pieces.append(text_event.render(delta.text))
                continue
            completion, error = without_failure(delta)
            if error is None or completion.text:
                tail = self._streamed.fields()
                for choice in self._deltas(number, output, completion):
                    pieces.append(event({**self._head, "choices": [choice], **tail}))
            if error is not None:
                return b"".join(pieces), error
            if self._is_plain:
                self._text_events[index] = self._text_event(index)
        return b"".join(pieces), None

    def _text_event(self, index: int) -> TextEvent:
        def chunk(text: str) -> dict[str, Any]:
            choice = self._text_delta(index, text)
            return {**self._head, "choices": [choice], **self._streamed.fields()}

        return TextEvent(chunk)
