"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.answer import Answer
from octavo.runtime.server.api_errors import ApiError
from octavo.runtime.server.context import ServerContext, new_id, note
from octavo.runtime.server.event_stream import EventStream, unless_disconnected
from octavo.runtime.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.runtime.server.protocol import ChatCompletionRequest, NamedToolChoice, TokenizeRequest
from octavo.runtime.server.sampling import chat_params
from octavo.runtime.server.tool_parsers import PARSERS, ForcedParser, ToolCall, ToolParser


async def create_chat_completion(
    context: ServerContext, body: ChatCompletionRequest, request: Request
) -> Response:
    """Answer a conversation; streamed or whole."""
    name = context.model_name(body.model)
    params = chat_params(body, context.default_params)
    parser = _parser_of(body, context.tool_parser)
    if parser is not None and parser().keeps_special_tokens:
        params = replace(params, skip_special_tokens=False)
    answer = _Answer(context, body, request, name, params, parser)
    if body.stream:
        return EventStream(answer.events(), context.explain)
    return await unless_disconnected(request.receive, answer.whole())


def rendering(
    context: ServerContext, body: ChatCompletionRequest | TokenizeRequest
) -> dict[str, Any]:
    """The keywords of AsyncLLM.prepare_chat that a body gives.

    Raises ApiError for a chat template of the client's own unless the server trusts those.
    """
    uses_tools = bool(body.tools) and getattr(body, "tool_choice", None) != "none"
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    found: dict[str, Any] = {
        "add_generation_prompt": not continues if adds is None else adds,
        "continue_final_message": continues,
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        if uses_tools
        else None,
    }
    if body.chat_template is not None:
        context.check_chat_template(body.chat_template)
        found["chat_template"] = body.chat_template
    kwargs = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    found["chat_template_kwargs"] = kwargs
    return found


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them: OpenAI's "developer" is their "system", and the arguments
    of a tool call are an object, not JSON text."""
    return [_template_message(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if changed.get("role") == "developer":
        changed["role"] = "system"
    calls = changed.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return changed


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise ApiError(
            400, "the arguments of a tool call in messages are not JSON", param="messages"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


class _Choice:
    """What has been told of one continuation."""

    def __init__(self, parser: ToolParser | None) -> None:
        self.parser = parser
        self.num_calls = 0

    def take(self, completion: CompletionOutput) -> tuple[str, list[dict[str, Any]]]:
        """The content and the tool calls that new text completes."""
        if self.parser is None:
            return completion.text, []
        content, calls = self.parser.feed(completion.text)
        if completion.finished():
            last_content, last_calls = self.parser.finish()
            content, calls = content + last_content, calls + last_calls
        return content, [self._call(call) for call in calls]

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "id": new_id("call"),
            "type": "function",
            "index": self.num_calls - 1,
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.num_calls else reason


class _Answer(Answer):
    """The answers to one conversation."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        request: Request,
        name: str,
        params: SamplingParams,
        parser: Any,
    ) -> None:
        head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": name,
        }
        is_plain = parser is None and not body.logprobs
        super().__init__(context, body, request, params, head, is_plain=is_plain)
        self._body = body
        self._parser = parser
        self._choices: dict[int, _Choice] = {}  # that have begun

    async def _prompts(self) -> list[Any]:
        messages = template_messages(self._body.messages)
        note(self._request, prompt=messages)
        prompt = await self._context.engine.prepare_chat(
            messages, **rendering(self._context, self._body)
        )
        salt = self._body.cache_salt
        return [prompt if salt is None else replace(prompt, cache_salt=salt)]

    def _whole_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        wanted = self._body.prompt_logprobs
        if wanted is None:
            return {}
        [output] = outputs
        return {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs or (), wanted)}

    def _new_choice(self) -> _Choice:
        return _Choice(None if self._parser is None else self._parser())

    def _deltas(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        index = completion.index
        if index not in self._choices:
            self._choices[index] = self._new_choice()
            yield _delta(index, {"role": "assistant", "content": ""})
        choice = self._choices[index]
        content, calls = choice.take(completion)
        logprobs = self._logprobs(completion)
        if not (content or calls or logprobs or completion.finished()):
            return
        delta: dict[str, Any] = {}
        if content or not calls:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        reason = choice.finish_reason(completion.finish_reason)
        found = _delta(index, delta, logprobs, reason)
        if completion.stop_reason is not None:
            found["stop_reason"] = completion.stop_reason
        yield found

    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def _whole_choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        choice = self._new_choice()
        content, calls = choice.take(completion)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in calls
            ]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": choice.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or not completion.logprobs:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs,
            self._context.engine.get_tokenizer(),
            self._body.top_logprobs or 0,
        )


def _delta(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _parser_of(body: ChatCompletionRequest, configured: str | None) -> Any:
    """What makes a parser for each continuation; None when there are no calls to expect."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        return lambda: ForcedParser(name)
    if choice == "required":
        return lambda: ForcedParser(None)
    if configured is None:
        raise ApiError(
            400,
            "the model's chat template has no tool-call format that is known here; use tool_choice "
            '"none" or "required", or start the server with --tool-call-parser',
            param="tools",
        )
    return PARSERS[configured]
