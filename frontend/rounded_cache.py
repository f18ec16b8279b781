"""Hugging Face's own model with a KV cache of codes: the reference of a program that has one.

Its attention is given keys and values that were rounded to codes and back, and is else untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from octavo.ir.kv_scheme import KVScheme, quantize_heads


@dataclass(frozen=True)
class HeadConstants:
    """What there is to a slot's codes: scales of heads of k and v ``f32[Hk]``, None for ones, and
    the offset of keys ``f32[Hk, D]``, None for zeros."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_offset: Tensor | None = None


class RoundedCache(DynamicCache):
    """A cache that gives back what codes stand for. ``num_updates`` counts calls of attention.

    ``heads`` are the constants of each call, in order; empty for none.
    ``noise`` is how far, relative to its own size, each number may be moved before it is rounded:
    what last bits that differ do to codes, and codes to the logits.
    """

    def __init__(
        self, scheme: KVScheme, heads: Sequence[HeadConstants] = (), noise: float = 0.0
    ) -> None:
        super().__init__()
        self.num_updates = 0
        self._scheme = scheme
        self._heads = heads
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **keywords: Any) -> Any:
        """Round k and v ``[1, Hk, T, D]``, and keep them."""
        heads = self._heads[self.num_updates] if self._heads else HeadConstants()
        self.num_updates += 1
        k = self._rounded(key_states, heads.k_scale, heads.k_offset)
        v = self._rounded(value_states, heads.v_scale, None)
        return super().update(k, v, *rest, **keywords)

    def _rounded(self, x: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
        tokens = x[0].transpose(0, 1).float()
        if self._noise:
            drawn = torch.rand(tokens.shape, generator=self._generator) * 2 - 1
            tokens = tokens * (1 + self._noise * drawn)
        codes, scales = quantize_heads(tokens, self._scheme, scale, offset)
        held = codes.float() * scales.unsqueeze(-1)
        if offset is not None:
            held = held + offset
        return held.transpose(0, 1)[None].to(x.dtype)
