"""GGML's quantised types as codes and scales.

A row is made of blocks, each with its own scales; here they are taken apart, and the two levels of
the K types are multiplied out, which is exact in f32. Source: ggml, ggml-common.h and
ggml-quants.c (dequantize_row_q4_0 and so on).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

# Codes, scales and offsets of blocks ``u8[count, bytes]``: ``[count, elements]`` and
# ``[count, scales in a block]``.
_Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class _Form:
    scheme: QuantScheme
    unpack: Callable[[Tensor], _Parts]


def kept_scheme(kind: GGMLQuantizationType) -> QuantScheme | None:
    """The scheme of a type; None for one that is read as numbers."""
    form = _FORMS.get(kind)
    return None if form is None else form.scheme


def unpack_rows(kind: GGMLQuantizationType, packed: Tensor, columns: int) -> QuantTensor:
    """The matrix of rows ``u8[N, bytes of a row]`` of a type that is kept."""
    form = _FORMS[kind]
    rows = packed.shape[0]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    codes, scales, offsets = form.unpack(packed.reshape(-1, block_bytes))
    return QuantTensor(
        form.scheme,
        codes.reshape(rows, columns).contiguous(),
        scales.reshape(rows, -1).contiguous(),
        offsets=None if offsets is None else offsets.reshape(rows, -1).contiguous(),
    )


def _half(blocks: Tensor, start: int) -> Tensor:
    """The f16 at a byte of each block, ``f16[count, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _halves_of_bytes(packed: Tensor) -> Tensor:
    """Lower fours of a run of bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Tensor) -> _Parts:
    return _halves_of_bytes(blocks[:, 2:]).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _halves_of_bytes(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> _Parts:
    scales, offsets = _scales_of_k(blocks)
    return _fours_of_k(blocks[:, 16:]).flatten(1), scales, offsets


def _q5_k(blocks: Tensor) -> _Parts:
    scales, offsets = _scales_of_k(blocks)
    fifth = torch.stack([(blocks[:, 16:48] >> bit) & 1 for bit in range(8)], 1)
    return (_fours_of_k(blocks[:, 48:]) | fifth << 4).flatten(1), scales, offsets


def _fours_of_k(packed: Tensor) -> Tensor:
    """``u8[count, 8, 32]``: of each 32 bytes the lower fours, then the upper."""
    return _halves_of_bytes(packed.view(-1, 4, 32)).view(-1, 8, 32)


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of each 32, f32: six bits each, packed in twelve bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    mins = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    scale, least = _half(blocks, 0).float(), _half(blocks, 2).float()
    return scale * scales.float(), -least * mins.float()


def _q6_k(blocks: Tensor) -> _Parts:
    fours = _halves_of_bytes(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    twos = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2).view(-1, 8, 32)
    codes = (fours | twos << 4).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).float()
    return codes.flatten(1), scales, None


_FORMS = {
    GGMLQuantizationType.Q4_0: _Form(QuantScheme("int4", (1, 32), "f16"), _q4_0),
    GGMLQuantizationType.Q4_1: _Form(QuantScheme("uint4", (1, 32), "f16", offset="f16"), _q4_1),
    GGMLQuantizationType.Q8_0: _Form(QuantScheme("int8", (1, 32), "f16"), _q8_0),
    GGMLQuantizationType.Q4_K: _Form(QuantScheme("uint4", (1, 32), "f32", offset="f32"), _q4_k),
    GGMLQuantizationType.Q5_K: _Form(QuantScheme("uint5", (1, 32), "f32", offset="f32"), _q5_k),
    GGMLQuantizationType.Q6_K: _Form(QuantScheme("int6", (1, 16), "f32"), _q6_k),
}
