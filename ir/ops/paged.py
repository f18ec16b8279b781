"""Attention on the paged KV cache, and the writes into it.

The reference state is a ``KVState``: plain tensors, one pair a slot. Operand layouts are those of
the step (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.kv_scheme import KVScheme, quantize_heads
from octavo.ir.ops.attention import allowed_pairs, attend, check_heads, first_seen
from octavo.ir.ops.registry import op
from octavo.ir.ops.rotary import check_rotary, rotary
from octavo.ir.types import KVType, TensorType

# A scheme, the scales of the heads where these are not ones, and the offset where there is one.
_Quantized = tuple[KVScheme, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class KVState:
    """A key and a value cache ``[num_blocks, block_size, heads, dim]`` for each slot.

    Where codes have scales a token, these are ``f32[num_blocks, heads, block_size]``, else none.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()
    value_scales: tuple[Tensor, ...] = ()

    @classmethod
    def empty(cls, kv: KVType, num_blocks: int, block_size: int) -> KVState:
        """Caches full of NaN: whoever reads what was never written will know.

        Integers cannot say that, their scales can; with scales a head they are zeros.
        """
        from octavo.ir.types import DTYPES

        dtype = DTYPES[kv.dtype]
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0).to(dtype)

        def make(heads: int, dim: int) -> Tensor:
            return nothing.repeat(num_blocks, block_size, heads, dim)

        scales = tuple(
            torch.full((num_blocks, slot.num_kv_heads, block_size), torch.nan)
            for slot in kv.slots
            if kv.scales == "token"
        )
        return cls(
            tuple(make(slot.num_kv_heads, slot.head_dim) for slot in kv.slots),
            tuple(make(slot.num_kv_heads, slot.v_head_dim) for slot in kv.slots),
            scales,
            tuple(scale.clone() for scale in scales),
        )

    @property
    def scheme(self) -> KVScheme | None:
        """How codes stand for keys and values, told from the tensors."""
        codes = {torch.float8_e4m3fn: "f8e4m3", torch.int8: "i8"}
        found = codes.get(self.keys[0].dtype) if self.keys else None
        return None if found is None else KVScheme(found, "token" if self.key_scales else "head")

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a block is made of; the first dim of each is that of blocks."""
        yield from (*self.keys, *self.values, *self.key_scales, *self.value_scales)


def _write(
    cache: Tensor, scales: Tensor | None, x: Tensor, slots: Tensor, quantized: _Quantized | None
) -> None:
    """Store x ``[T, Hk, D]`` at rows of one cache."""
    rows = cache.flatten(0, 1)
    if quantized is None:
        rows[slots] = x
        return
    codes, of_tokens = quantize_heads(x, *quantized)
    rows.view(torch.uint8)[slots] = codes.view(torch.uint8)
    if scales is not None:
        size = cache.shape[1]
        scales[slots // size, :, slots % size] = of_tokens


def _read(
    cache: Tensor, scales: Tensor | None, blocks: Tensor, seen: slice, head_scale: Tensor | None
) -> Tensor:
    """The tokens ``seen`` of these blocks ``[Hk, tokens, D]``; f32 where codes are held."""
    codes = cache[blocks].flatten(0, 1)[seen].transpose(0, 1)
    if cache.dtype not in (torch.int8, torch.float8_e4m3fn):
        return codes
    if scales is not None:
        return codes.float() * scales[blocks].transpose(0, 1).flatten(1)[:, seen, None]
    return codes.float() if head_scale is None else codes.float() * head_scale.view(-1, 1, 1)


@op
def kv_write(
    kv: KVState,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    *,
    slot: int,
) -> KVState:
    """Store k ``[T, Hk, D]`` and v ``[T, Hk, Dv]`` at ``slot_mapping`` of one slot's caches.

    Caches of codes take them quantised, by ``k_scale`` and ``v_scale`` ``f32[Hk]`` if scales are of
    heads; None stands for ones. ``k_offset`` ``f32[Hk, D]`` is taken off k, and stays off.
    """
    sides = (
        (kv.keys, kv.key_scales, k, k_scale, k_offset),
        (kv.values, kv.value_scales, v, v_scale, None),
    )
    for caches, scales, x, head_scale, offset in sides:
        quantized = None if kv.scheme is None else (kv.scheme, head_scale, offset)
        _write(caches[slot], scales[slot] if scales else None, x, slot_mapping, quantized)
    return kv


def _check_slot(
    name: str,
    kv: KVType,
    slot: int,
    k: TensorType,
    v: TensorType,
    *scales: TensorType | None,
) -> None:
    if not 0 <= slot < len(kv.slots):
        raise VerifyError(f"{name}: slot {slot} is not one of the {len(kv.slots)} of {kv}")
    shape = kv.slots[slot]
    expected = ((shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.v_head_dim))
    if (k.shape[1:], v.shape[1:]) != expected:
        raise VerifyError(f"{name}: k {k} and v {v} do not fit slot {slot}, {shape}")
    wanted = k.dtype if kv.scheme is not None else kv.dtype
    if k.dtype != wanted or v.dtype != wanted:
        raise VerifyError(f"{name}: k {k} and v {v} are not of the cache's dtype {wanted}")
    _check_scales(name, kv, slot, *scales)


def _check_scales(name: str, kv: KVType, slot: int, *scales: TensorType | None) -> None:
    if len({scale is None for scale in scales}) > 1:
        raise VerifyError(f"{name}: expected scales of both k and v, or of neither")
    expected = TensorType("f32", (kv.slots[slot].num_kv_heads,))
    for scale in scales:
        if scale is None:
            continue
        if kv.scales != "head":
            raise VerifyError(f"{name}: {kv} has no scales of heads, such as the {scale} given")
        if scale != expected:
            raise VerifyError(f"{name}: expected a scale for each KV head, {expected}, got {scale}")


def _check_offset(name: str, kv: KVType, slot: int, offset: TensorType | None) -> None:
    if offset is None:
        return
    if kv.scheme is None:
        raise VerifyError(f"{name}: {kv} holds no codes, so that its keys have no offset")
    shape = kv.slots[slot]
    expected = TensorType("f32", (shape.num_kv_heads, shape.head_dim))
    if offset != expected:
        raise VerifyError(f"{name}: expected an offset of keys {expected}, got {offset}")


@kv_write.infer
def _(
    kv: KVType,
    k: TensorType,
    v: TensorType,
    slot_mapping: TensorType,
    k_scale: TensorType | None = None,
    v_scale: TensorType | None = None,
    k_offset: TensorType | None = None,
    *,
    slot: int,
) -> KVType:
    _check_slot("kv_write", kv, slot, k, v, k_scale, v_scale)
    _check_offset("kv_write", kv, slot, k_offset)
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    *,
    slot: int,
    interleaved: bool = False,
) -> tuple[Tensor, KVState]:
    """Rotate q and k, store k and v; returns the rotated q and the state."""
    q, k = (rotary.evaluate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, kv_write.evaluate(kv, k, v, slot_mapping, k_scale, v_scale, k_offset, slot=slot)


@rotary_kv_write.infer
def _(
    kv: KVType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    cos: TensorType,
    sin: TensorType,
    slot_mapping: TensorType,
    k_scale: TensorType | None = None,
    v_scale: TensorType | None = None,
    k_offset: TensorType | None = None,
    *,
    slot: int,
    interleaved: bool = False,
) -> tuple[TensorType, KVType]:
    for x in (q, k):
        check_rotary("rotary_kv_write", x, cos, sin)
    _check_slot("rotary_kv_write", kv, slot, k, v, k_scale, v_scale)
    _check_offset("rotary_kv_write", kv, slot, k_offset)
    return q, kv


@op
def paged_attention(
    q: Tensor,
    kv: KVState,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    slot: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens with its cached context (Kwon et al. 2023).

    q ``[T, H, D]``; returns ``[T, H, Dv]``. The last of a sequence's tokens sits at position
    ``seq_lens[s] - 1``. ``window`` counts the query itself. Everything is read from the cache, new
    tokens too: codes stand for what they were rounded to, whichever step wrote them.
    """
    keys, values = kv.keys[slot], kv.values[slot]
    key_scales, value_scales = (x[slot] if x else None for x in (kv.key_scales, kv.value_scales))
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
        seen = slice(oldest - begin, length - begin)
        k = _read(keys, key_scales, blocks, seen, k_scale)
        v = _read(values, value_scales, blocks, seen, v_scale)
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
    k_scale: TensorType | None = None,
    v_scale: TensorType | None = None,
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
    _check_scales("paged_attention", kv, slot, k_scale, v_scale)
    return q.with_shape(q.shape[0], q.shape[1], shape.v_head_dim)
