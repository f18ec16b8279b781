"""From the fields of a request to SamplingParams, and to what the scheduler is told."""

from __future__ import annotations

from typing import Any

from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.api_errors import ApiError
from octavo.runtime.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    NamedToolChoice,
    SamplingRequest,
)

# Fields of a request that SamplingParams has under the same name.
_SAME_NAMES = (
    "n",
    "best_of",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
# What a model's makers may recommend in generation_config.json.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_ARRIVAL = ("priority", "deadline_ms", "queue_timeout_ms")


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises InvalidRequest, or ApiError."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
    values = _common(body, defaults)
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = _larger(body.logprobs, body.prompt_logprobs)
    if body.max_tokens is not None:
        # The step that computes the prompt gives a token anyway, which is then left out.
        values["max_tokens"] = 1 if is_prompt_only(body) else body.max_tokens
    return SamplingParams(**values)


def is_prompt_only(body: CompletionRequest) -> bool:
    """Whether the answer is the echoed prompt and nothing more."""
    return bool(body.echo) and body.max_tokens == 0


def chat_params(body: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises InvalidRequest, or ApiError."""
    values = _common(body, defaults)
    is_new_name = body.max_completion_tokens is not None
    values["max_tokens"] = body.max_completion_tokens if is_new_name else body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    forced = _forced_tool_schema(body)
    if forced is not None:
        values["structured_outputs"] = {"json": forced}
    return SamplingParams(**values)


def arrival_of(body: SamplingRequest) -> dict[str, Any]:
    """The keywords of Engine.add_request that the request gives."""
    return {name: value for name in _ARRIVAL if (value := getattr(body, name)) is not None}


def _common(body: SamplingRequest, defaults: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(defaults, name) for name in _RECOMMENDED}
    for name in _SAME_NAMES:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise ApiError(400, "best_of above n cannot be streamed", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if body.logit_bias:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    structured = _structured(body)
    if structured is not None:
        values["structured_outputs"] = structured
    return values


def _larger(count: int, other: int | None) -> int:
    """The number of log-probabilities that is enough for both; -1 is all of them."""
    return count if other is None else -1 if -1 in (count, other) else max(count, other)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ApiError(
            400, f"logit_bias: {key!r:.40} is not a token id", param="logit_bias"
        ) from None


def _structured(body: SamplingRequest) -> dict[str, Any] | None:
    """``response_format``, or vLLM's ``structured_outputs``, as the latter."""
    wanted = getattr(body, "response_format", None)
    if wanted is None:
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise ApiError(
            400, "give response_format or structured_outputs, not both", param="response_format"
        )
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(
                400, "response_format.json_schema.schema must be an object", param="response_format"
            )
        return {"json": schema}
    raise ApiError(
        400,
        f"response_format.type must be text, json_object or json_schema, got {kind!r:.40}",
        param="response_format",
    )


def _forced_tool_schema(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """The JSON schema of an answer that has to be tool calls; None when it need not be."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not body.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice):
        for tool in body.tools:
            if tool.function.name == choice.function.name:
                return tool.function.parameters or {"type": "object"}
        raise ApiError(
            400,
            f"tool_choice names {choice.function.name!r:.80}, which is not among tools",
            param="tool_choice",
        )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in body.tools
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
