"""How the KV cache holds keys and values when it holds codes: the scheme in the type of the state.

    kv<f8e4m3 head, 30 x [3, 64, 64]>   e4m3 with one scale a KV head: a weight, 1 if there is none
    kv<i8 token, 30 x [3, 64, 64]>      8-bit integers with a scale for each token and KV head

A scale of a token and head is the largest magnitude among its elements over the largest code, and
is written beside the codes. The value of a code is ``code * scale``.

Keys may have an offset taken off before, the same for all tokens. Nobody adds it again: it adds the
same number, q times the offset, to all scores of a query, which softmax does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError

# The largest magnitude of a code. Integers leave -128 out, so that codes are symmetric.
LARGEST = {"f8e4m3": 448.0, "i8": 127.0}
_DTYPES = {"f8e4m3": torch.float8_e4m3fn, "i8": torch.int8}
_SCALES = ("head", "token")


@dataclass(frozen=True)
class KVScheme:
    """``codes`` is a key of LARGEST, ``scales`` is ``head`` (static) or ``token`` (and head)."""

    codes: str
    scales: str

    def __str__(self) -> str:
        return f"{self.codes} {self.scales}"

    @classmethod
    def parse(cls, text: str) -> KVScheme:
        """The scheme of a text form. Raises VerifyError."""
        codes, _, scales = text.partition(" ")
        if codes not in LARGEST or scales not in _SCALES:
            raise VerifyError(
                f"{text!r} is no scheme of a KV cache; expected one of "
                + ", ".join(str(cls(c, s)) for c in LARGEST for s in _SCALES)
            )
        return cls(codes, scales)

    @property
    def largest(self) -> float:
        """The largest magnitude of a code."""
        return LARGEST[self.codes]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes."""
        return _DTYPES[self.codes]

    @property
    def has_token_scales(self) -> bool:
        """Whether scales are written with the codes."""
        return self.scales == "token"


def quantize_heads(
    x: Tensor, scheme: KVScheme, scale: Tensor | None, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes ``[T, Hk, D]`` of x ``[T, Hk, D]``, and the scales ``f32[T, Hk]`` that belong to them.

    ``scale`` is ``f32[Hk]``, None for ones; with scales a token it is not looked at. ``offset``
    ``f32[Hk, D]`` is taken off x first. Everything is computed in f32. What is beyond the largest
    code becomes that code, ties go to the even one.
    """
    wide = x.float() if offset is None else x.float() - offset
    if scheme.has_token_scales:
        # By a tensor: what PyTorch divides by a number on a GPU it multiplies by the inverse.
        scales = wide.abs().amax(-1) / wide.new_tensor(scheme.largest)
    else:
        scales = torch.ones(x.shape[1], device=x.device) if scale is None else scale.float()
        scales = scales.expand(x.shape[:2])
    # A head of zeros has a scale of zero, and codes of zero.
    values = wide / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    values = values.clamp(-scheme.largest, scheme.largest)
    if not scheme.dtype.is_floating_point:
        values = values.round()
    return values.to(scheme.dtype), scales
