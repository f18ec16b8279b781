"""Ops that GPU kernels run as one: see "Fused ops of these targets" in docs/cuda.md.

Made by the last passes of the cuda pipeline. All compute in f32 (f64 for f64 inputs) and round
once, where the unfused ops round after each step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.elementwise import ACTIVATIONS, softcap
from octavo.ir.ops.linear import embedding
from octavo.ir.ops.norm import rms_norm
from octavo.ir.ops.paged import KVState, paged_attention, rotary_kv_write
from octavo.ir.ops.registry import op
from octavo.ir.quant_tensor import QuantTensor, dense
from octavo.ir.types import DTYPES, KVType, QuantType, TensorType

SUMSQ_COLUMNS = 64  # of a residual stream, whose squares are added up in one number


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sumsq(x: Tensor) -> Tensor:
    return x.float().square().view(*x.shape[:-1], -1, SUMSQ_COLUMNS).sum(-1)


def _sumsq_type(name: str, x: TensorType) -> TensorType:
    width = x.shape[-1]
    if not isinstance(width, int) or width % SUMSQ_COLUMNS:
        raise VerifyError(f"{name}: the width of {x} is not a multiple of {SUMSQ_COLUMNS}")
    return TensorType("f32", (*x.shape[:-1], width // SUMSQ_COLUMNS))


@op
def embedding_sumsq(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight[ids]``, and the sums of squares of each 64 columns, ``f32[T, width / 64]``."""
    rows = embedding.evaluate(ids, weight)
    return rows, _sumsq(rows)


@embedding_sumsq.infer
def _(ids: TensorType, weight: TensorType) -> tuple[TensorType, TensorType]:
    rows = weight.with_shape(*ids.shape, weight.shape[1])
    return rows, _sumsq_type("embedding_sumsq", rows)


@op
def fused_linear(
    x: Tensor,
    weight: Tensor | QuantTensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    sumsq: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    activation: str | None = None,
    cap: float | None = None,
    out_dtype: str | None = None,
    emit_sumsq: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear with what stands around it: ``[..., N]``, and with ``emit_sumsq`` its sumsq.

    In this order: RMS norm of x ``[..., K]`` without a weight if ``norm_eps`` is set;
    ``@ weight.T`` and bias; ``activation(first half) * second half`` of the columns; softcap;
    ``+ residual``. ``sumsq`` ``f32[..., K / 64]`` is that of x and changes no value: a kernel may
    take the norm from it. A quantised weight is dequantised to the dtype of the sums.
    ``out_dtype`` is that of the result, by default that of x.
    """
    wide = _wide(x)
    if norm_eps is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)
    y = F.linear(wide, dense(weight, wide.dtype), None if bias is None else bias.to(wide.dtype))
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    if cap is not None:
        y = softcap.evaluate(y, cap=cap)
    if residual is not None:
        y = y + residual.to(y.dtype)
    y = y.to(DTYPES[out_dtype] if out_dtype else x.dtype)
    return (y, _sumsq(y)) if emit_sumsq else y


@fused_linear.infer
def _(
    x: TensorType,
    weight: TensorType | QuantType,
    bias: TensorType | None = None,
    residual: TensorType | None = None,
    sumsq: TensorType | None = None,
    *,
    norm_eps: float | None = None,
    activation: str | None = None,
    cap: float | None = None,
    out_dtype: str | None = None,
    emit_sumsq: bool = False,
) -> TensorType | tuple[TensorType, TensorType]:
    if weight.rank != 2 or x.shape[-1] != weight.shape[1]:
        raise VerifyError(f"fused_linear: the last dim of {x} is not K of the weight {weight}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise VerifyError(f"fused_linear: the bias {bias} does not fit the weight {weight}")
    width = weight.shape[0]
    if activation is not None:
        if activation not in ACTIVATIONS or not isinstance(width, int) or width % 2:
            raise VerifyError(f"fused_linear: no gated {activation!r} of {width} columns")
        width //= 2
    out = TensorType(out_dtype or x.dtype, (*x.shape[:-1], width))
    if residual is not None and residual != out:
        raise VerifyError(f"fused_linear: the residual {residual} differs from the result {out}")
    if sumsq is not None and (norm_eps is None or sumsq != _sumsq_type("fused_linear", x)):
        raise VerifyError(f"fused_linear: {sumsq} is not the sumsq of a normalised {x}")
    return (out, _sumsq_type("fused_linear", out)) if emit_sumsq else out


@op
def rotary_paged_attention(
    kv: KVState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    *,
    slot: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
    norm_eps: float | None = None,
    norm_offset: float = 0.0,
) -> tuple[Tensor, KVState]:
    """Norm of the heads of q and k if ``norm_eps`` is set, rotation, KV write, paged attention.

    q ``[T, H, D]``, k ``[T, Hk, D]``, v ``[T, Hk, Dv]``; ``q_norm`` and ``k_norm`` ``[D]``, applied
    as ``norm_offset + weight``; ``k_scale``, ``v_scale`` and ``k_offset`` are those of
    ``kv_write``. Returns ``[T, H, Dv]`` and the state.
    """
    if norm_eps is not None:
        q = rms_norm.evaluate(q, q_norm, eps=norm_eps, weight_offset=norm_offset)
        k = rms_norm.evaluate(k, k_norm, eps=norm_eps, weight_offset=norm_offset)
    new = (q, k, v, cos, sin, slot_mapping)
    q, kv = rotary_kv_write.evaluate(
        kv, *new, k_scale, v_scale, k_offset, slot=slot, interleaved=interleaved
    )
    out = paged_attention.evaluate(
        q,
        kv,
        block_table,
        query_start,
        seq_lens,
        sinks,
        k_scale,
        v_scale,
        slot=slot,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
    )
    return out, kv


@rotary_paged_attention.infer
def _(
    kv: KVType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    cos: TensorType,
    sin: TensorType,
    slot_mapping: TensorType,
    block_table: TensorType,
    query_start: TensorType,
    seq_lens: TensorType,
    sinks: TensorType | None = None,
    q_norm: TensorType | None = None,
    k_norm: TensorType | None = None,
    k_scale: TensorType | None = None,
    v_scale: TensorType | None = None,
    k_offset: TensorType | None = None,
    *,
    slot: int,
    interleaved: bool = False,
    norm_eps: float | None = None,
    **attrs: object,
) -> tuple[TensorType, KVType]:
    """By the rules of the two ops that it is made of."""
    for weight in (q_norm, k_norm):
        if weight is not None and (norm_eps is None or weight.shape != q.shape[2:]):
            raise VerifyError(f"rotary_paged_attention: the norm weight {weight} does not fit {q}")
    assert rotary_kv_write.infer_rule is not None, "declared with a rule"
    assert paged_attention.infer_rule is not None, "declared with a rule"
    new, scales = (k, v, cos, sin, slot_mapping), (k_scale, v_scale)
    rotary_kv_write.infer_rule(kv, q, *new, *scales, k_offset, slot=slot, interleaved=interleaved)
    read = (block_table, query_start, seq_lens, sinks)
    out = paged_attention.infer_rule(q, kv, *read, *scales, slot=slot)
    assert isinstance(out, TensorType), "attention gives one tensor"
    return out, kv
