"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.context import (
    ServerContext,
    StreamedUsage,
    Usage,
    finished,
    interleaved,
    new_id,
    note,
    note_usage,
    without_failure,
)
from octavo.runtime.server.event_stream import EventStream, event, unless_disconnected
from octavo.runtime.server.logprobs import completion_logprobs
from octavo.runtime.server.protocol import CompletionRequest
from octavo.runtime.server.sampling import arrival_of, completion_params


async def create_completion(
    context: ServerContext, body: CompletionRequest, request: Request
) -> Response:
    """Continue one prompt or several; streamed or whole."""
    name = context.model_name(body.model)
    params = completion_params(body, context.default_params)
    answer = _Answer(context, body, request, name, params)
    if body.stream:
        return EventStream(answer.events(), context.explain)
    return await unless_disconnected(request.receive, answer.whole())


class _Answer:
    """One request on its way."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        request: Request,
        name: str,
        params: SamplingParams,
    ) -> None:
        self._context = context
        self._body = body
        self._request = request
        self._params = params
        self._prompts = _split(body.prompt)
        self._arrival = arrival_of(body)
        self._num_each = params.n
        self._usage = Usage()
        self._offsets: dict[int, int] = {}  # where the text of a choice goes on
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    async def whole(self) -> Response:
        """The answer in one piece."""
        async with self._context.submitted(
            await self._prepared(), self._params, "final", self._arrival
        ) as streams:
            outputs = await finished(streams)
        choices = []
        for number, output in enumerate(outputs):
            self._usage.count(number, output)
            for completion in output.outputs:
                choices.append(self._choice(number, output, completion, is_first=True))
        usage = self._usage.to_dict()
        note_usage(self._request, usage)
        return JSONResponse({**self._head, "choices": choices, "usage": usage})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in events."""
        streamed = StreamedUsage(self._body.stream_options, self._usage)
        async with self._context.submitted(
            await self._prepared(), self._params, "delta", self._arrival
        ) as streams:
            seen: set[int] = set()
            async for number, output in interleaved(streams):
                self._usage.count(number, output)
                tail = streamed.fields()
                for delta in output.outputs:
                    completion, error = without_failure(delta)
                    is_first = self._index(number, completion) not in seen
                    seen.add(self._index(number, completion))
                    choice = self._choice(number, output, completion, is_first=is_first)
                    if error is None or completion.text:
                        yield event({**self._head, "choices": [choice], **tail})
                    if error is not None:
                        raise error
        usage = self._usage.to_dict()
        note_usage(self._request, usage)
        if streamed.is_wanted:
            yield event({**self._head, "choices": [], "usage": usage})

    async def _prepared(self) -> list[Any]:
        """The prompts as LLM.generate takes them."""
        note(self._request, prompt=self._prompts)
        salt, adds = self._body.cache_salt, self._body.add_special_tokens
        prepared: list[Any] = []
        for prompt in self._prompts:
            shape: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            shape["prompt" if isinstance(prompt, str) else "prompt_token_ids"] = prompt
            if adds is False and isinstance(prompt, str):
                encode = self._context.engine.get_tokenizer().encode
                shape["prompt_token_ids"] = await self._context.engine.offload(
                    encode, prompt, False
                )
            prepared.append(shape)
        return prepared

    def _index(self, number: int, completion: CompletionOutput) -> int:
        return number * self._num_each + completion.index

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        index = self._index(number, completion)
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        entries = None if logprobs is None else list(logprobs)
        if self._body.echo and is_first:
            text = self._prompt_text(output) + text
            if entries is not None:
                token_ids = [*output.prompt_token_ids, *token_ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
        found = None
        if entries is not None:
            found, self._offsets[index] = completion_logprobs(
                token_ids,
                entries,
                self._body.logprobs or 0,
                self._offsets.get(index, 0),
                lambda token_id: self._text_of([token_id]),
            )
        return {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _prompt_text(self, output: RequestOutput) -> str:
        return self._text_of(output.prompt_token_ids) if output.prompt is None else output.prompt

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, which are no part of an echoed prompt."""
        return self._context.engine.get_tokenizer().decode(token_ids, skip_special_tokens=True)


def _split(prompt: Any) -> list[Any]:
    """The prompts of a request: a string or a list of ids is one, a list of those several."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
