"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.answer import Answer
from octavo.runtime.server.context import ServerContext, new_id, note
from octavo.runtime.server.event_stream import EventStream, unless_disconnected
from octavo.runtime.server.logprobs import completion_logprobs, prompt_logprobs
from octavo.runtime.server.protocol import CompletionRequest
from octavo.runtime.server.sampling import completion_params, is_prompt_only


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


class _Answer(Answer):
    """The continuations of the prompts of one request."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        request: Request,
        name: str,
        params: SamplingParams,
    ) -> None:
        head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        is_plain = body.logprobs is None
        super().__init__(context, body, request, params, head, is_plain=is_plain)
        self._body = body
        self._offsets: dict[int, int] = {}  # where the text of a choice goes on

    async def _prompts(self) -> list[Any]:
        """The prompts as LLM.generate takes them."""
        prompts = _split(self._body.prompt)
        note(self._request, prompt=prompts)
        salt, adds = self._body.cache_salt, self._body.add_special_tokens
        prepared: list[Any] = []
        for prompt in prompts:
            shape: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            shape["prompt" if isinstance(prompt, str) else "prompt_token_ids"] = prompt
            if adds is False and isinstance(prompt, str):
                encode = self._context.engine.get_tokenizer().encode
                shape["prompt_token_ids"] = await self._context.engine.offload(
                    encode, prompt, False
                )
            prepared.append(shape)
        return prepared

    def _shown(self, output: RequestOutput) -> RequestOutput:
        return _without_tokens(output) if is_prompt_only(self._body) else output

    def _whole_choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        choice = self._choice(number, output, completion)
        wanted = self._body.prompt_logprobs
        if wanted is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), wanted)
        return choice

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        index = self._index(number, completion)
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        entries = None if logprobs is None else list(logprobs)
        if self._body.echo and index not in self._offsets:
            text = self._prompt_text(output) + text
            if entries is not None:
                token_ids = [*output.prompt_token_ids, *token_ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
        found, offset = None, self._offsets.setdefault(index, 0)
        if entries is not None:
            found, self._offsets[index] = completion_logprobs(
                token_ids,
                entries,
                self._body.logprobs or 0,
                offset,
                lambda token_id: self._text_of([token_id]),
            )
        return _plain_choice(index, text, found, completion.finish_reason, completion.stop_reason)

    def _deltas(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        yield self._choice(number, output, completion)

    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        return _plain_choice(index, text)

    def _prompt_text(self, output: RequestOutput) -> str:
        return self._text_of(output.prompt_token_ids) if output.prompt is None else output.prompt

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, which are no part of an echoed prompt."""
        return self._context.engine.get_tokenizer().decode(token_ids, skip_special_tokens=True)


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """The output without what was generated, which nobody asked for."""
    return replace(output, outputs=[_without_token(each) for each in output.outputs])


def _without_token(completion: CompletionOutput) -> CompletionOutput:
    if completion.finish_reason not in ("stop", "length"):
        return completion
    logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    return CompletionOutput(completion.index, "", [], logprobs=logprobs, finish_reason="length")


def _plain_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _split(prompt: Any) -> list[Any]:
    """The prompts of a request: a string or a list of ids is one, a list of those several."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
