"""What Hugging Face says of a request with its sampling parameters: each token, in any company.

The rows are Hugging Face's, the filters transformers' own, and the rest is written from the
definition: a greedy token is the likeliest, a drawn one is the first, in the order of the
vocabulary, whose cumulative probability exceeds the request's uniform number. That number is
Philox's, of seed, sample and place, which tests/runtime/test_philox.py holds to published vectors.

Near-ties are those of DESIGN section 8. A log-probability may be off by ``limit``, so the reference
leaves a token undecided where that could change it: two likeliest closer than this, a number so
close to the border of two tokens, or a filter whose border lies between tokens as close.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.runtime.outputs import CompletionOutput
from octavo.runtime.philox import uniforms
from octavo.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestReference:
    """``logprobs`` gives ``f64[len(ids), vocab]``, what Hugging Face says after each token, and
    ``limit`` is how far from it a port may be."""

    logprobs: Callable[[Sequence[int]], Tensor]
    limit: float

    def check(
        self, prompt: Sequence[int], params: SamplingParams, answer: CompletionOutput, where: str
    ) -> int:
        """Assert that each token and log-probability is right; how many tokens were decided.

        A token is judged on the prefix that the port has written.
        """
        assert answer.finish_reason == "length", f"{where}: ended by {answer.finish_reason}"
        assert len(answer.token_ids) == params.max_tokens, where
        rows = self.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert answer.logprobs is not None
        num_decided = 0
        for place, (row, token) in enumerate(zip(rows, answer.token_ids, strict=True)):
            here = f"{where}, token {place}"
            entry = answer.logprobs[place]
            assert len(entry) >= (params.logprobs or 0), here
            for token_id, found in entry.items():
                off = abs(found.logprob - float(row[token_id]))
                assert off <= self.limit, f"{here}: {token_id} is off by {off:.3g}"
            scores = _penalized(row, params, answer.token_ids[:place])
            if params.is_greedy:
                num_decided += self._check_greedy(scores, token, here)
            else:
                position = len(prompt) + place
                [number] = uniforms([params.seed or 0], [0], [position]).tolist()
                num_decided += self._check_drawn(scores, token, params, number, here)
        return num_decided

    def _check_greedy(self, scores: Tensor, token: int, where: str) -> bool:
        behind = float(scores.max() - scores[token])
        assert behind <= 2 * self.limit, f"{where}: {token} is behind the best by {behind:.3g}"
        first, second = scores.topk(2).values.tolist()
        return bool(first - second > 2 * self.limit)

    def _check_drawn(
        self, scores: Tensor, token: int, params: SamplingParams, number: float, where: str
    ) -> bool:
        scores = scores / params.temperature
        slack = 2 * self.limit / params.temperature  # in a difference of two scores
        kept = _filtered(scores, params)
        lowest = float(kept[kept.isfinite()].min())
        assert scores[token] >= lowest - slack, f"{where}: {token} should have been cut off"
        if not _is_filter_sure(scores, params, slack):
            return False
        weights = kept.softmax(-1)
        high = float(weights[: token + 1].sum())
        low = high - float(weights[token])
        # A probability errs by its own share of the slack, and so does the sum of any of them.
        assert low - slack <= number <= high + slack, (
            f"{where}: {token} is drawn from {low:.6f} to {high:.6f}, the number is {number:.6f}"
        )
        return low + slack < number < high - slack


def _penalized(row: Tensor, params: SamplingParams, output: Sequence[int]) -> Tensor:
    """OpenAI's definition of its two penalties."""
    scores = row.clone()
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """In the order that SamplingParams states: each sees what the one before left."""
    filters: list[LogitsProcessor] = []
    if params.min_p > 0.0:
        filters.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        filters.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        filters.append(TopPLogitsWarper(params.top_p))
    kept = scores[None]
    for each in filters:
        kept = each(None, kept)
    return kept[0]


def _is_filter_sure(scores: Tensor, params: SamplingParams, slack: float) -> bool:
    """Whether no filter's border moves when each score does by half the slack."""
    variants = []
    for sign in (-1.0, 1.0):
        moved = SamplingParams(
            min_p=min(1.0, params.min_p * math.exp(sign * slack)),
            top_k=params.top_k,
            top_p=params.top_p if params.top_p == 1.0 else params.top_p - sign * slack,
        )
        variants.append(_filtered(scores, moved).isfinite())
    if not torch.equal(*variants):
        return False
    kept, cut = scores[variants[0]], scores[~variants[0]]
    return len(cut) == 0 or bool(kept.min() - cut.max() > slack)
