"""How the parts of a quantised matrix lie in an artifact: by the layout that its kernel asks for.

A layout is a name, a function that packs a QuantTensor into tensors by part, and its inverse. Parts
are ``codes``, ``scales``, and ``zeros`` or ``offsets``, in this order; kernels take them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPE_NAMES, DTYPES, QuantType, TensorType

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class QuantLayout:
    """``pack`` also runs on meta tensors; ``unpack(pack(q), type of q)`` is q, bit for bit."""

    name: str
    pack: Callable[[QuantTensor], Parts]
    unpack: Callable[[Mapping[str, Tensor], QuantType], QuantTensor]

    def part_types(self, matrix: QuantType) -> dict[str, TensorType]:
        """The types of the parts of a matrix."""
        parts = self.pack(_empty(matrix))
        return {
            name: TensorType(DTYPE_NAMES[part.dtype], tuple(part.shape))
            for name, part in parts.items()
        }


def find_layout(name: str) -> QuantLayout:
    """The layout of a name."""
    return LAYOUTS[name]


def _empty(matrix: QuantType) -> QuantTensor:
    """A matrix of a type without its numbers: on the meta device."""
    scheme, sides = matrix.scheme, matrix.scheme.scale_shape(*matrix.shape)

    def make(dtype: str, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=DTYPES[dtype], device="meta")

    return QuantTensor(
        scheme,
        make(scheme.format.dtype, matrix.shape),
        make(scheme.scale, sides),
        None if scheme.zero is None else make(scheme.zero, sides),
        None if scheme.offset is None else make(scheme.offset, sides),
    )


def _pack_plain(matrix: QuantTensor) -> Parts:
    """All as it is: a code in a byte."""
    return dict(matrix.parts())


def _unpack_plain(parts: Mapping[str, Tensor], matrix: QuantType) -> QuantTensor:
    return QuantTensor(matrix.scheme, **parts)


def _pack_nibbles(matrix: QuantTensor) -> Parts:
    """Codes of 4 bits, two in a byte ``u8[N, K/2]``: that of the even column in the lower half.

    Signed codes lie in two's complement; a last odd column has zeros above it.
    """
    assert matrix.scheme.format.bits == 4, f"{matrix.scheme} has no codes of 4 bits"
    bits = matrix.codes.view(torch.uint8) & 15
    even, odd = bits[:, ::2], bits[:, 1::2]
    odd = torch.nn.functional.pad(odd, (0, even.shape[1] - odd.shape[1]))
    return {**dict(matrix.parts()), "codes": even | odd << 4}


def _unpack_nibbles(parts: Mapping[str, Tensor], matrix: QuantType) -> QuantTensor:
    packed, form = parts["codes"], matrix.scheme.format
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, : matrix.shape[1]]
    if form.low < 0:
        codes = (codes ^ 8) - 8  # the sign bit of 4 becomes that of 8, modulo 256
    codes = codes.view(DTYPES[form.dtype]).contiguous()
    return QuantTensor(matrix.scheme, **{**parts, "codes": codes})


LAYOUTS = {
    layout.name: layout
    for layout in (
        QuantLayout("plain", _pack_plain, _unpack_plain),
        QuantLayout("nibbles", _pack_nibbles, _unpack_nibbles),
    )
}
