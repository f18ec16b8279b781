"""Hugging Face's own model with a KV cache of codes: the reference of a program that has one.

Its attention is given keys and values that were rounded to codes and back, and is else untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from octavo.ir.kv_scheme import KVScheme, quantize_heads

# Scales of heads of k and of v for each call of attention, in order; empty for ones.
HeadScales = Sequence[tuple[Tensor, Tensor]]


class RoundedCache(DynamicCache):
    """A cache that gives back what codes stand for. ``num_updates`` counts calls of attention.

    ``noise`` is how far, relative to its own size, each number may be moved before it is rounded:
    what last bits that differ do to codes, and codes to the logits.
    """

    def __init__(self, scheme: KVScheme, scales: HeadScales = (), noise: float = 0.0) -> None:
        super().__init__()
        self.num_updates = 0
        self._scheme = scheme
        self._scales = scales
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **keywords: Any) -> Any:
        """Round k and v ``[1, Hk, T, D]``, and keep them."""
        scales = self._scales[self.num_updates] if self._scales else (None, None)
        self.num_updates += 1
        k, v = (
            self._rounded(x, scale)
            for x, scale in zip((key_states, value_states), scales, strict=True)
        )
        return super().update(k, v, *rest, **keywords)

    def _rounded(self, x: Tensor, scale: Tensor | None) -> Tensor:
        tokens = x[0].transpose(0, 1).float()
        if self._noise:
            drawn = torch.rand(tokens.shape, generator=self._generator) * 2 - 1
            tokens = tokens * (1 + self._noise * drawn)
        codes, scales = quantize_heads(tokens, self._scheme, scale)
        return (codes.float() * scales.unsqueeze(-1)).transpose(0, 1)[None].to(x.dtype)
