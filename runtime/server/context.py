"""What all endpoints share: the engine, the model's names, and how requests get to the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.request_stream import RequestStream
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.api_errors import ApiError, api_error_of, unfinished
from octavo.runtime.server.middleware import client_of
from octavo.runtime.server.protocol import StreamOptions


@dataclass
class ServerContext:
    """``model_names`` are what a request may call the model; the first is how it calls itself."""

    engine: AsyncLLM
    model_names: tuple[str, ...]
    tool_parser: str | None = None
    trusts_chat_templates: bool = False
    uses_keys: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.default_params: SamplingParams = self.engine.get_default_sampling_params()

    def model_name(self, wanted: str | None) -> str:
        """The name to answer with. Raises ApiError when there is no such model."""
        if wanted is None:
            return self.model_names[0]
        if wanted not in self.model_names:
            raise ApiError(
                404,
                f"the model {wanted!r:.200} does not exist; there is {self.model_names[0]!r}",
                code="model_not_found",
                param="model",
            )
        return wanted

    def check_chat_template(self, wanted: str) -> None:
        """Raises ApiError for a template in a request: it is a program, and a short one can take
        all memory and never end. The model's own may be named."""
        if (
            not self.trusts_chat_templates
            and wanted not in self.engine.get_tokenizer().chat_templates
        ):
            raise ApiError(
                400,
                "a chat_template in a request is not taken: name one of the model's own, or start "
                "the server with --trust-request-chat-template",
                param="chat_template",
            )

    def client(self, request: Request, user: Any) -> str:
        """Whose request it is: the key's where there are keys, else the user's that it names, else
        the address'. A key is not to get more by naming many users."""
        if self.uses_keys or not isinstance(user, str):
            return client_of(request.scope, self.uses_keys)
        return user

    def explain(self, error: Exception) -> ApiError:
        """How an error is told, with an estimate of when the queue has room again."""
        return api_error_of(error, self.engine.expected_wait_seconds)

    @asynccontextmanager
    async def submitted(
        self,
        prompts: Sequence[Any],
        params: SamplingParams,
        kind: OutputKind,
        arrival: dict[str, Any],
    ) -> AsyncIterator[list[RequestStream]]:
        """The engine's streams of some prompts; those that are not finished end with the block."""
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                stream = await self.engine.add_request(
                    None, prompt, params, output_kind=kind, **arrival
                )
                streams.append(stream)
            yield streams
        finally:
            for stream in streams:
                stream.close()


async def finished(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The last outputs. Raises ApiError when one of them is not what was asked for."""
    outputs = []
    for stream in streams:
        async for output in stream:
            last = output
        for completion in last.outputs:
            _, error = without_failure(completion)
            if error is not None:
                raise error
        outputs.append(last)
    return outputs


def without_failure(completion: CompletionOutput) -> tuple[CompletionOutput, ApiError | None]:
    """A delta, and the error with which its continuation ended, if it did."""
    error = unfinished(completion.finish_reason, completion.stop_reason)
    if error is None:
        return completion, None
    return replace(completion, finish_reason=None, stop_reason=None), error


def interleaved(streams: Sequence[RequestStream]) -> AsyncIterator[RequestOutput]:
    """Outputs of several streams as they come."""
    return streams[0] if len(streams) == 1 else _interleaved(streams)


async def _interleaved(streams: Sequence[RequestStream]) -> AsyncGenerator[RequestOutput, None]:
    queue: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()

    async def pump(stream: RequestStream) -> None:
        try:
            async for output in stream:
                queue.put_nowait(output)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for each in pumps:
            each.cancel()


class Usage:
    """Tokens of a request so far."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_output_tokens = 0

    def count(self, number: int, output: RequestOutput) -> None:
        """Count what an output brings: of deltas each, of finals the one."""
        self._prompts[number] = len(output.prompt_token_ids), output.num_cached_tokens or 0
        for each in output.outputs:
            self._num_output_tokens += len(each.token_ids)

    def to_dict(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }


class StreamedUsage:
    """What a stream's ``stream_options`` want to be told of its usage."""

    def __init__(self, options: StreamOptions | None, usage: Usage) -> None:
        self._usage = usage
        self.is_wanted = options is not None and bool(options.include_usage)
        self.is_continuous = options is not None and bool(options.continuous_usage_stats)

    def fields(self) -> dict[str, Any]:
        """What every chunk has of it."""
        if self.is_continuous:
            return {"usage": self._usage.to_dict()}
        return {"usage": None} if self.is_wanted else {}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def note(request: Request, **facts: Any) -> None:
    """Facts for the access log's line of this request."""
    request.scope.setdefault("octavo.log", {}).update(facts)


def note_usage(request: Request, usage: dict[str, Any]) -> None:
    note(request, **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
