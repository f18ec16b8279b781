"""Attention on the paged KV cache, and the writes into it.

The reference state is a ``KVState``: plain tensors, one pair a slot. Operand layouts are those of
the step (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.attention import allowed_pairs, attend, check_heads, first_seen
from octavo.ir.ops.registry import op
from octavo.ir.ops.rotary import check_rotary, rotary
from octavo.ir.types import KVType, TensorType


@dataclass(frozen=True)
class KVState:
    """A key and a value cache ``[num_blocks, block_size, heads, dim]`` for each slot."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def empty(cls, kv: KVType, num_blocks: int, block_size: int) -> KVState:
        """Caches full of NaN: whoever reads what was never written will know."""
        from octavo.ir.types import DTYPES

        def make(heads: int, dim: int) -> Tensor:
            shape = (num_blocks, block_size, heads, dim)
            return torch.full(shape, torch.nan, dtype=DTYPES[kv.dtype])

        return cls(
            tuple(make(slot.num_kv_heads, slot.head_dim) for slot in kv.slots),
            tuple(make(slot.num_kv_heads, slot.v_head_dim) for slot in kv.slots),
        )


@op
def kv_write(kv: KVState, k: Tensor, v: Tensor, slot_mapping: Tensor, *, slot: int) -> KVState:
    """Store k ``[T, Hk, D]`` and v ``[T, Hk, Dv]`` at ``slot_mapping`` of one slot's caches."""
    kv.keys[slot].flatten(0, 1)[slot_mapping] = k
    kv.values[slot].flatten(0, 1)[slot_mapping] = v
    return kv


def _check_slot(name: str, kv: KVType, slot: int, k: TensorType, v: TensorType) -> None:
    if not 0 <= slot < len(kv.slots):
        raise VerifyError(f"{name}: slot {slot} is not one of the {len(kv.slots)} of {kv}")
    shape = kv.slots[slot]
    expected = ((shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.v_head_dim))
    if (k.shape[1:], v.shape[1:]) != expected:
        raise VerifyError(f"{name}: k {k} and v {v} do not fit slot {slot}, {shape}")
    if k.dtype != kv.dtype or v.dtype != kv.dtype:
        raise VerifyError(f"{name}: k {k} and v {v} are not of the cache's dtype {kv.dtype}")


@kv_write.infer
def _(kv: KVType, k: TensorType, v: TensorType, slot_mapping: TensorType, *, slot: int) -> KVType:
    _check_slot("kv_write", kv, slot, k, v)
    return kv


@op
def rotary_kv_write(
    kv: KVState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    *,
    slot: int,
    interleaved: bool = False,
) -> tuple[Tensor, KVState]:
    """Rotate q and k, store k and v; returns the rotated q and the state."""
    q, k = (rotary.evaluate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, kv_write.evaluate(kv, k, v, slot_mapping, slot=slot)


@rotary_kv_write.infer
def _(
    kv: KVType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    cos: TensorType,
    sin: TensorType,
    slot_mapping: TensorType,
    *,
    slot: int,
    interleaved: bool = False,
) -> tuple[TensorType, KVType]:
    for x in (q, k):
        check_rotary("rotary_kv_write", x, cos, sin)
    _check_slot("rotary_kv_write", kv, slot, k, v)
    return q, kv


@op
def paged_attention(
    q: Tensor,
    kv: KVState,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    *,
    slot: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens with its cached context (Kwon et al. 2023).

    q ``[T, H, D]``; returns ``[T, H, Dv]``. The last of a sequence's tokens sits at position
    ``seq_lens[s] - 1``. ``window`` counts the query itself.
    """
    keys, values = kv.keys[slot], kv.values[slot]
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    for s, length in enumerate(seq_lens.tolist()):
        first, last = query_start[s : s + 2].tolist()
        if first == last:
            continue
        start = length - (last - first)
        # What no token of the step sees is not read: those blocks may be gone.
        oldest = first_seen(start, window, chunk)
        begin = oldest // keys.shape[1] * keys.shape[1]
        blocks = block_table[s, begin // keys.shape[1] : -(-length // keys.shape[1])].long()
        k, v = (
            x[blocks].flatten(0, 1)[oldest - begin : length - begin].transpose(0, 1)
            for x in (keys, values)
        )
        ticks = torch.arange(oldest, length, device=q.device)
        allowed = allowed_pairs(ticks[start - oldest :], ticks, True, window, chunk)
        out[first:last] = attend(
            q[first:last].transpose(0, 1), k, v, sinks, None, allowed, scale=scale, softcap=softcap
        )
    return out


@paged_attention.infer
def _(
    q: TensorType,
    kv: KVType,
    block_table: TensorType,
    query_start: TensorType,
    seq_lens: TensorType,
    sinks: TensorType | None = None,
    *,
    slot: int,
    **attrs: object,
) -> TensorType:
    if not 0 <= slot < len(kv.slots):
        raise VerifyError(f"paged_attention: slot {slot} is not one of the {len(kv.slots)} of {kv}")
    shape = kv.slots[slot]
    if q.rank != 3 or q.shape[2] != shape.head_dim:
        raise VerifyError(f"paged_attention: q {q} does not fit slot {slot}, {shape}")
    check_heads("paged_attention", q.shape[1], shape.num_kv_heads, shape.num_kv_heads)
    return q.with_shape(q.shape[0], q.shape[1], shape.v_head_dim)
