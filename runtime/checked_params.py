"""Sampling parameters against the model that they are for: the checks of every entry point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.grammars import Grammars
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.validation import refusal, token_ids


def checked_params(
    params: Any, *, vocab_size: int, max_logprobs: int, has_tokenizer: bool, grammars: Grammars
) -> SamplingParams:
    """A copy that suits the model. Raises InvalidRequest, before anything is run.

    A grammar that ``grammars`` has not seen is compiled here, which may take its time.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling parameters must be SamplingParams, got {params!r:.80}")
    # A copy, checked again: its fields may have been set since it was made, and may be later.
    checked = replace(params)
    token_ids("stop_token_ids", checked.stop_token_ids, vocab_size)
    token_ids("allowed_token_ids", checked.allowed_token_ids, vocab_size)
    token_ids("logit_bias", list(checked.logit_bias or ()), vocab_size)
    _check_logprobs("logprobs", checked.logprobs, max_logprobs)
    _check_logprobs("prompt_logprobs", checked.prompt_logprobs, max_logprobs)
    if not has_tokenizer:
        _check_without_tokenizer(checked)
    if checked.structure is not None:
        grammars.guide(checked.structure)
    return checked


def _check_logprobs(name: str, wanted: int | None, limit: int) -> None:
    if wanted is None or limit == -1 or 0 <= wanted <= limit:
        return
    raise InvalidRequest(
        f"{name}={wanted} is beyond max_logprobs={limit}; ask for fewer, or load with a higher "
        "max_logprobs (-1 for no limit)",
        param=name,
    )


def _check_without_tokenizer(params: SamplingParams) -> None:
    if params.stop:
        raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
    if params.bad_words:
        raise refusal("bad_words", "need a tokenizer; use logit_bias or logits_processors")
