"""Next-token distributions of two models, compared token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """What compiling changed, over ``num_tokens`` predicted tokens.

    ``kl_mean`` and ``kl_p99`` are of the KL divergence of the artifact's distribution from the
    reference's, ``sum p_ref (log p_ref - log p)``, in nats; ``top1_agreement`` is the share of
    tokens for which both find the same one likeliest.
    """

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float

    @property
    def perplexity_increase(self) -> float:
        """As a share: 0.01 is one per cent."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass
class LossMeter:
    """Adds up rows of logits. All in f64 but the logarithms of probabilities, f32."""

    nll: float = 0.0
    reference_nll: float = 0.0
    num_agreed: int = 0
    _divergences: list[Tensor] = field(default_factory=list)

    def add(self, reference: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Rows ``f32[R, V]`` of the reference and the artifact, and the tokens that came."""
        expected, got = reference.log_softmax(-1), logits.log_softmax(-1)
        self.reference_nll -= _picked(expected, targets)
        self.nll -= _picked(got, targets)
        self.num_agreed += int((expected.argmax(-1) == got.argmax(-1)).sum())
        self._divergences.append(_divergence(expected, got))

    def loss(self) -> Loss:
        """The figures of all rows so far."""
        divergences = torch.cat(self._divergences)
        count = len(divergences)
        return Loss(
            num_tokens=count,
            perplexity=math.exp(self.nll / count),
            reference_perplexity=math.exp(self.reference_nll / count),
            kl_mean=float(divergences.mean()),
            kl_p99=float(divergences.quantile(0.99)),
            top1_agreement=self.num_agreed / count,
        )


def _picked(logprobs: Tensor, targets: Tensor) -> float:
    return float(logprobs.gather(1, targets[:, None]).double().sum())


def _divergence(expected: Tensor, got: Tensor) -> Tensor:
    """``f64[R]``. A token that is impossible for the reference adds nothing."""
    terms = expected.exp() * (expected - got)
    return terms.masked_fill_(expected == -torch.inf, 0.0).double().sum(-1)
