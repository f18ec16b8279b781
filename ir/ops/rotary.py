"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.types import TensorType


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair by 90 degrees: ``(a, b) -> (-b, a)``.

    Pairs are ``(i, i + D/2)``, or neighbours ``(2i, 2i + 1)`` when interleaved.
    """
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@op
def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``D_rot`` of each head's dims: ``x * cos + rotate(x) * sin``, in f32.

    x ``[T, heads, D]``; cos and sin ``[T, D_rot]`` with ``D_rot <= D``, each angle given for both
    members of its pair. The rest of the dims pass through.
    """
    width = cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    head, rest = x[..., :width].to(wide), x[..., width:]
    turned = head * cos.to(wide).unsqueeze(1) + rotate(head, interleaved) * sin.to(wide).unsqueeze(
        1
    )
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def check_rotary(name: str, x: TensorType, cos: TensorType, sin: TensorType) -> None:
    """Raise VerifyError unless x is ``[T, heads, D]`` and the tables are ``[T, D_rot]``."""
    if x.rank != 3 or cos.rank != 2 or cos.shape != sin.shape or cos.shape[0] != x.shape[0]:
        raise VerifyError(f"{name}: {x} does not fit the tables {cos} and {sin}")
    width, head_dim = cos.shape[1], x.shape[2]
    if not isinstance(width, int) or not isinstance(head_dim, int):
        raise VerifyError(f"{name}: {x} and the tables {cos} must be static but for the tokens")
    if width > head_dim or width % 2:
        raise VerifyError(f"{name}: rotary dim {width} must be even, at most {head_dim}")


@rotary.infer
def _(x: TensorType, cos: TensorType, sin: TensorType, **attrs: object) -> TensorType:
    check_rotary("rotary", x, cos, sin)
    return x
