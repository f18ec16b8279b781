"""Attention over a whole sequence at once: what a traced model calls, before the cache is paged."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.types import TensorType


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    allowed: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention in f32 (f64 for f64 inputs).

    q ``[H, Tq, D]``, k ``[Hk, Tk, D]``, v ``[Hk, Tk, Dv]``, sinks ``[H]``, bias broadcastable to
    ``[H, Tq, Tk]``, allowed bool ``[Tq, Tk]``. Returns ``[Tq, H, Dv]`` in the dtype of q.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[0] // k.shape[0]
    k, v = (x.to(wide).repeat_interleave(group, 0) for x in (k, v))
    scores = q.to(wide) @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = (
            scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        )
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        # A sink is a logit with no value: it takes its share of the softmax and gives nothing.
        extra = sinks.to(wide).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1).to(q.dtype)


def allowed_pairs(
    q_positions: Tensor, k_positions: Tensor, causal: bool, window: int | None, chunk: int | None
) -> Tensor:
    """Bool ``[Tq, Tk]``: which key each query may see.

    ``window`` counts the query itself: key j is seen when ``i - j < window``. ``chunk`` cuts the
    positions into chunks that do not see each other.
    """
    i, j = q_positions[:, None], k_positions[None, :]
    allowed = (j <= i) if causal else torch.ones_like(j <= i)
    if window is not None:
        allowed = allowed & (i - j < window)
    if chunk is not None:
        allowed = allowed & (i // chunk == j // chunk)
    return allowed


def first_seen(position: int, window: int | None, chunk: int | None) -> int:
    """The oldest position that a causal query at ``position`` sees; no later one sees older."""
    oldest = 0 if window is None else max(0, position - window + 1)
    return oldest if chunk is None else max(oldest, position // chunk * chunk)


@op
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one sequence with itself: q ``[1, H, T, D]``, k and v ``[1, Hk, T, D]``.

    Returns ``[1, T, H, Dv]``, the layout of Hugging Face's attention functions.
    """
    ticks = torch.arange(q.shape[2], device=q.device)
    allowed = allowed_pairs(ticks, ticks, causal, window, chunk)
    if bias is not None:
        bias = bias[0, ..., : k.shape[2]]
    out = attend(q[0], k[0], v[0], sinks, bias, allowed, scale=scale, softcap=softcap)
    return out.unsqueeze(0).contiguous()


@attention.infer
def _(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    sinks: TensorType | None = None,
    bias: TensorType | None = None,
    **attrs: object,
) -> TensorType:
    check_heads("attention", q.shape[1], k.shape[1], v.shape[1])
    if q.rank != 4 or q.shape[3] != k.shape[3] or q.shape[0] != 1:
        raise VerifyError(f"attention: q {q} does not fit k {k} and v {v}")
    return q.with_shape(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def check_heads(name: str, heads: object, k_heads: object, v_heads: object) -> None:
    """Raise VerifyError unless the query heads are a multiple of the KV heads."""
    if not isinstance(heads, int) or not isinstance(k_heads, int) or k_heads != v_heads:
        raise VerifyError(f"{name}: {k_heads} key heads and {v_heads} value heads differ")
    if heads % k_heads:
        raise VerifyError(f"{name}: {heads} query heads are no multiple of {k_heads} KV heads")
