"""How Triton kernels want a quantised matrix: packed once, in the order in which they stream it.

Codes lie in 16-bit words of ``pieces`` codes, 4 of 4 bits or 2 of 8. Within a *span* of
``pieces * piece`` columns, code i of word j is column ``i * piece + j``: so shifting and masking
whole registers gives operands of a product, for columns that lie next to one another in x.

    4 bits: i16[spans, N, piece]    the words of a span of all rows, then those of the next
    8 bits: [N, spans * 2 * piece]  whole rows, which a product of 8-bit operands takes as they are,
                                    as the order of columns is all the same to it

Columns beyond K are codes of zero. Scales, zeros and offsets of a span of a row stand side by side,
``[spans, N, groups]``, 4 or 8 bytes or a multiple of 8 together, so that one copy fetches them.
Where a row has one scale, scales are ``f32[N]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPES

CODES = ("int4", "uint4", "f4e2m1", "f8e4m3", "int8", "int6", "uint5")
_PIECES = {4: (128, 64, 32, 16), 8: (64, 32, 16)}


@dataclass(frozen=True)
class TritonLayout:
    """The layout of a matrix ``[n, k]`` of a scheme: words of ``pieces`` codes, ``piece`` apart."""

    scheme: QuantScheme
    n: int
    k: int
    piece: int
    pieces: int

    @classmethod
    def of(cls, scheme: QuantScheme, n: int, k: int) -> TritonLayout:
        """The layout with the widest pieces that add at most a sixteenth to K, or with those that
        add least. Raises VerifyError for a scheme that the kernels do not know."""
        if reason := why_no_kernel(scheme):
            raise VerifyError(f"{scheme}: there is no Triton kernel for {reason}")
        width = 4 if scheme.format.bits == 4 else 8
        pieces, group = 16 // width, scheme.block[1]
        fitting = [p for p in _PIECES[width] if group is None or p <= group <= pieces * p]
        if scheme.x_block is not None:  # a span has one scale on either side
            fitting = [scheme.x_block // pieces]
        piece = min(fitting, key=lambda p: (max(-k % (pieces * p), k // 16), -p))
        return cls(scheme, n, k, piece, pieces)

    @property
    def span(self) -> int:
        """Columns that share their words."""
        return self.pieces * self.piece

    @property
    def num_spans(self) -> int:
        return -(-self.k // self.span)

    @property
    def groups(self) -> int:
        """Scales of a span of a row; 0 where rows have one scale each."""
        return 0 if self.scheme.block[1] is None else -(-self.span // self.scheme.block[1])

    @property
    def slots(self) -> int:
        """Places for scales of a span: as many as make up 4 bytes, if there are fewer."""
        return max(self.groups, 4 // DTYPES[self.scheme.scale].itemsize)

    @property
    def has_gemv(self) -> bool:
        """True when one row of x is multiplied row by row of the weight, not by tiles of rows."""
        words = self.num_spans * self.piece
        return self.pieces == 2 and not self.groups and self.scheme.zero is None and words <= 16384

    def constants(self, dtype: str, out_dtype: str) -> dict[str, Any]:
        """What the template has to know, for an x and a result of these dtypes."""
        scheme = self.scheme
        # PyTorch's product of fp8 operands, which wants whole 16 bytes and makes bf16.
        has_scaled = scheme.x == "f8e4m3" and scheme.x_block is None and self.n % 16 == 0
        return {
            "scheme": str(scheme),
            "has_gemv": self.has_gemv,
            "codes": scheme.codes,
            "pieces": self.pieces,
            "piece": self.piece,
            "groups": self.groups,
            "slots": self.slots,
            "scale_dtype": scheme.scale,
            "has_zeros": scheme.zero is not None,
            "has_offsets": scheme.offset is not None,
            "offset_dtype": scheme.offset,
            "x_codes": scheme.x,
            "x_block": scheme.x_block,
            "has_scaled": has_scaled and dtype == out_dtype == "bf16",
            "num_bytes": sum(
                math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in self.shapes().values()
            ),
        }

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each packed part."""
        scheme, sides = self.scheme, (self.num_spans, self.n)
        parts: dict[str, tuple[str, tuple[int, ...]]]
        if self.pieces == 4:
            parts = {"codes": ("i16", (*sides, self.piece))}
        else:
            parts = {"codes": (scheme.format.dtype, (self.n, self.num_spans * self.span))}
        if not self.groups:
            return parts | {"scales": ("f32", (self.n,))}
        parts["scales"] = (scheme.scale, (*sides, self.slots))
        if scheme.zero is not None:
            parts["zeros"] = ("u8", (*sides, 4))
        if scheme.offset is not None:
            parts["offsets"] = (scheme.offset, (*sides, self.slots))
        return parts

    def pack(self, matrix: QuantTensor) -> dict[str, Tensor]:
        """The parts of a matrix of this scheme and shape."""
        assert (matrix.scheme, *matrix.shape) == (self.scheme, self.n, self.k)
        packed = {"codes": self._pack_codes(matrix.codes)}
        if not self.groups:
            scales = matrix.scales.float().flatten()
            return packed | {"scales": scales.repeat_interleave(self.n // len(scales))}
        for name, part in matrix.parts():
            if name != "codes":
                packed[name] = self._pack_sides(part, 4 if name == "zeros" else self.slots)
        return packed

    def _pack_codes(self, codes: Tensor) -> Tensor:
        bits = codes.view(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, self.num_spans * self.span - self.k))
        spans = bits.view(self.n, self.num_spans, self.pieces, self.piece)
        if self.pieces == 2:
            return spans.transpose(2, 3).flatten(1).view(codes.dtype).contiguous()
        if self.scheme.codes == "int4":
            spans = spans + 8
        shifted = (spans & 15).int() << (4 * torch.arange(4, device=codes.device).view(4, 1))
        return shifted.sum(2).to(torch.int16).transpose(0, 1).contiguous()

    def _pack_sides(self, sides: Tensor, slots: int) -> Tensor:
        up = self.scheme.block[0]
        rows = sides.repeat_interleave(up or self.n, 0)[: self.n]
        wanted = self.num_spans * self.groups
        bits = rows.view(torch.uint8).view(self.n, -1, sides.itemsize)
        bits = torch.nn.functional.pad(bits, (0, 0, 0, wanted - bits.shape[1]))
        bits = bits.view(self.n, self.num_spans, self.groups, sides.itemsize).transpose(0, 1)
        bits = torch.nn.functional.pad(bits, (0, 0, 0, slots - self.groups))
        return bits.contiguous().view(sides.dtype).squeeze(-1)

    def unpack(self, parts: Mapping[str, Tensor]) -> QuantTensor:
        """What was packed; scales of a matrix or of 128 rows come back as such."""
        codes = self._unpack_codes(parts["codes"])
        shape = self.scheme.scale_shape(self.n, self.k)
        if not self.groups:
            scales = parts["scales"].view(shape[0], -1)[:, :1].to(DTYPES[self.scheme.scale])
            return QuantTensor(self.scheme, codes, scales)
        step = self.scheme.block[0] or self.n
        sides = {
            name: self._unpack_sides(parts[name])[::step, : shape[1]].contiguous()
            for name in ("scales", "zeros", "offsets")
            if name in parts
        }
        return QuantTensor(self.scheme, codes, **sides)

    def _unpack_sides(self, packed: Tensor) -> Tensor:
        return packed[..., : self.groups].transpose(0, 1).flatten(1)

    def _unpack_codes(self, packed: Tensor) -> Tensor:
        if self.pieces == 2:
            spans = packed.view(torch.uint8).view(self.n, self.num_spans, self.piece, 2)
            flat = spans.transpose(2, 3).reshape(self.n, -1).view(packed.dtype)
            return flat[:, : self.k].contiguous()
        shifts = 4 * torch.arange(4, device=packed.device).view(4, 1)
        spans = (packed.transpose(0, 1).unsqueeze(2).int() >> shifts) & 15
        codes = spans.reshape(self.n, -1)[:, : self.k]
        return (codes - 8 if self.scheme.codes == "int4" else codes).to(
            DTYPES[self.scheme.format.dtype]
        )


def why_no_kernel(scheme: QuantScheme) -> str | None:
    """What of a scheme the kernels do not know; None where there is one for it."""
    up, across = scheme.block
    if scheme.codes not in CODES:
        return f"codes of {scheme.codes}"
    if across not in (None, 16, 32, 64, 128):
        return f"groups of {across}: they are of 16, 32, 64 or 128"
    if across is not None and up is None:
        return "groups that all rows share"
    if up not in (None, 1) and across is None:
        return f"scales of {up} whole rows"
    if scheme.x_block not in (None, across) or (scheme.x_block and scheme.format.bits != 8):
        return f"x in blocks of {scheme.x_block}"
    if scheme.zero not in (None, "u8"):
        return f"zeros of {scheme.zero}"
    if across is None and (scheme.zero or scheme.offset):
        return "zeros or offsets of whole rows"
    if scheme.zero and scheme.offset:
        return "zeros and offsets at once"
    if scheme.scale not in ("bf16", "f16", "f32", "f8e8m0"):
        return f"scales of {scheme.scale}"
    return None
