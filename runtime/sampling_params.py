"""How a request is sampled, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.structured_outputs import StructuredOutputsParams, structured_outputs
from octavo.runtime.validation import (
    boolean,
    integer,
    real,
    refusal,
    strings,
    token_ids,
    token_weights,
)

# Below this a temperature means greedy: dividing by it would only overflow. vLLM's bound.
GREEDY_BELOW = 1e-5
SEED_BITS = 64
MAX_SAMPLES = 16384  # of one prompt: a slip of the hand must not fill the memory. vLLM's bound.
MAX_LOGIT_BIAS = 100.0  # as OpenAI's API has it: enough to decide, too little to overflow

_NOT_BUILT = ("extra_args",)  # known to vLLM


@dataclass
class SamplingParams:
    """Sampling parameters; unset ones keep vLLM's defaults.

    ``n`` samples of one prompt are given; of ``best_of`` made, the n of the highest cumulative
    log-probability. ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0 and
    ``typical_p`` 1 are off. A filter sees what the one before left: typical_p, min_p, top_k, then
    top_p, all after the temperature. Before it come, in this order, ``logits_processors``
    (callables ``(output_ids, logits)`` or ``(prompt_ids, output_ids, logits)`` that return logits
    ``f32[vocab]``), what is forbidden (by ``structured_outputs``, see StructuredOutputsParams,
    ``allowed_token_ids``, ``bad_words`` and ``min_tokens``), ``logit_bias``, and the penalties:
    ``repetition_penalty`` for tokens of the prompt and the output, ``frequency_penalty`` and
    ``presence_penalty`` for those of the output.
    ``seed`` makes the request reproducible in any company; -1 is none, as in vLLM. ``stop`` ends at
    a string, which is left out of the text unless ``include_stop_str_in_output``;
    ``stop_token_ids`` ends at a token. ``max_tokens`` None runs to the model's limit.
    ``logprobs`` N gives the N best tokens and the chosen one at each step, of the distribution
    before any of these; -1 gives all. ``prompt_logprobs`` N gives them for the prompt's tokens.
    ``truncate_prompt_tokens`` N keeps the last N tokens of a longer prompt.
    Raises InvalidRequest, a ValueError, for an impossible value.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None  # its older name
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: dict[str, Any] | None = None
    typical_p: float = 1.0  # not vLLM's: transformers' name

    def __post_init__(self) -> None:
        self._refuse_what_is_not_built()
        self._check_number()
        self._check_distribution()
        self._check_rules()
        self._check_length_and_stop()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """``structured_outputs``, checked."""
        given = self.structured_outputs
        return given if isinstance(given, StructuredOutputsParams) else None

    def _refuse_what_is_not_built(self) -> None:
        for name in _NOT_BUILT:
            value = getattr(self, name)
            if value is not None and value != {}:
                raise InvalidRequest(
                    f"{name}={value!r} is not supported by this version of octavo; leave {name} "
                    "out",
                    param=name,
                )

    def _check_number(self) -> None:
        self.n = integer("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            self.best_of = integer("best_of", self.best_of, 1, MAX_SAMPLES)
            if self.best_of < self.n:
                raise refusal("best_of", f"must be at least n={self.n}, got {self.best_of}")

    def _check_distribution(self) -> None:
        self.temperature = real("temperature", self.temperature, low=0.0)
        self.top_p = _positive("top_p", self.top_p, high=1.0)
        self.typical_p = _positive("typical_p", self.typical_p, high=1.0)
        self.top_k = max(0, integer("top_k", self.top_k, low=-1))
        self.min_p = real("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            low, high = -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1
            self.seed = integer("seed", self.seed, low, high)
            self.seed = None if self.seed == -1 else self.seed  # vLLM's other word for none
        if self.logprobs is not None:
            self.logprobs = integer("logprobs", self.logprobs, low=-1)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = integer("prompt_logprobs", self.prompt_logprobs, low=-1)

    def _check_rules(self) -> None:
        self.presence_penalty = real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _positive("repetition_penalty", self.repetition_penalty)
        self.bad_words = strings("bad_words", self.bad_words)
        self.logit_bias = token_weights("logit_bias", self.logit_bias, MAX_LOGIT_BIAS) or None
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise refusal("allowed_token_ids", "is empty and allows nothing; leave it out")
        self.logits_processors = _processors(self.logits_processors)
        self._check_structure()

    def _check_structure(self) -> None:
        guided = structured_outputs("guided_decoding", self.guided_decoding)
        self.structured_outputs = structured_outputs("structured_outputs", self.structured_outputs)
        if guided is None:
            return
        if self.structured_outputs is not None:
            raise InvalidRequest(
                "give structured_outputs or guided_decoding, not both", param="structured_outputs"
            )
        self.structured_outputs, self.guided_decoding = guided, None

    def _check_length_and_stop(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = integer("max_tokens", self.max_tokens, low=1)
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = integer(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, low=1
            )
        self.min_tokens = integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal(
                "min_tokens", f"must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        self.stop = strings("stop", self.stop)
        self.stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids)
        for field in fields(self):
            if isinstance(field.default, bool):
                boolean(field.name, getattr(self, field.name))
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings need detokenize=True: they are looked for in text", param="stop"
            )


def _positive(name: str, value: Any, high: float | None = None) -> float:
    number = real(name, value, high=high)
    if number <= 0.0:
        raise refusal(name, f"must be above 0, got {number:g}")
    return number


def _processors(value: Any) -> tuple[Callable[..., Any], ...]:
    items = () if value is None else value
    if not isinstance(items, Sequence) or not all(map(callable, items)):
        raise refusal("logits_processors", f"must be a list of callables, got {value!r:.80}")
    return tuple(items)
