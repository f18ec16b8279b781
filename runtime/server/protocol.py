"""The bodies of requests: OpenAI's names, then vLLM's additions to them.

None is the same as absent. What is not listed is refused, since leaving it out silently would give
another answer than the one that was asked for.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(RequestBody):
    """``include_usage`` adds a last chunk with the usage, ``continuous_usage_stats`` to each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # pads OpenAI's own traffic; nothing to do here


class SamplingRequest(RequestBody):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # vLLM's: sampling
    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    # vLLM's, and two of Octavo's own: scheduling
    priority: int | None = None
    cache_salt: str | None = None
    deadline_ms: float | None = None
    queue_timeout_ms: float | None = None

    # OpenAI's that change nothing about an answer of this server
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class FunctionDefinition(RequestBody):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    name: str


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: FunctionName


class RenderingRequest(RequestBody):
    """How a conversation becomes a prompt."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatCompletionRequest(SamplingRequest, RenderingRequest):
    """POST /v1/chat/completions."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Any = None  # for templates that read it
    verbosity: Any = None


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
