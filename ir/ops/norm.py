"""Normalisations over the last dim, and their fusions with the residual add before them.

All reduce in f32 (f64 for f64 inputs) and return the dtype of ``x``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.types import TensorType


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@op
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)`` (Zhang and Sennrich 2019).

    ``weight_offset`` is 1 in Gemma. ``round_first`` rounds to the dtype of ``x`` before the weight
    is applied, as Llama does; otherwise the weight is applied in f32.
    """
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if round_first:
        normed = normed.to(x.dtype)
        return (normed * (weight + weight_offset if weight_offset else weight)).to(x.dtype)
    return (normed * (weight_offset + weight.to(normed.dtype))).to(x.dtype)


def _check_norm(name: str, x: TensorType, *params: TensorType | None) -> TensorType:
    for param in params:
        # Cohere normalises heads with a weight for each head: [heads, head_dim].
        if param is not None and param.shape != x.shape[x.rank - param.rank :]:
            raise VerifyError(f"{name}: the weight {param} does not fit {x}")
    return x


@rms_norm.infer
def _(x: TensorType, weight: TensorType | None = None, **attrs: object) -> TensorType:
    return _check_norm("rms_norm", x, weight)


@op
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), all in f32."""
    wide = _wide(x)
    normed = F.layer_norm(wide, x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    if bias is not None:
        normed = normed + bias.to(normed.dtype)
    return normed.to(x.dtype)


@layer_norm.infer
def _(
    x: TensorType,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    **attrs: object,
) -> TensorType:
    return _check_norm("layer_norm", x, weight, bias)


def _check_add(name: str, x: TensorType, residual: TensorType) -> None:
    if x != residual:
        raise VerifyError(f"{name}: {x} and the residual {residual} differ")


@op
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual``; returns ``rms_norm(s, weight)`` and ``s``, the new residual."""
    total = x + residual
    normed = rms_norm.evaluate(
        total, weight, eps=eps, weight_offset=weight_offset, round_first=round_first
    )
    return normed, total


@add_rms_norm.infer
def _(
    x: TensorType, residual: TensorType, weight: TensorType | None = None, **attrs: object
) -> tuple[TensorType, TensorType]:
    _check_add("add_rms_norm", x, residual)
    return _check_norm("add_rms_norm", x, weight), x


@op
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual``; returns ``layer_norm(s, weight, bias)`` and ``s``, the new residual."""
    total = x + residual
    return layer_norm.evaluate(total, weight, bias, eps=eps), total


@add_layer_norm.infer
def _(
    x: TensorType,
    residual: TensorType,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    **attrs: object,
) -> tuple[TensorType, TensorType]:
    _check_add("add_layer_norm", x, residual)
    return _check_norm("add_layer_norm", x, weight, bias), x
