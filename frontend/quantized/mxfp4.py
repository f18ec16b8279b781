"""MXFP4 experts as gpt-oss ships them.

``*_blocks`` u8 ``[experts, N, K / 32, 16]``: two e2m1 codes a byte, the lower four bits first;
``*_scales`` u8 ``[experts, N, K / 32]``: exponents plus 127. The model has a stack of them
transposed, ``[experts, K, N]``. Sources: OCP Microscaling Formats Specification 1.0; transformers,
integrations/mxfp4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import (
    PackedMatrix,
    check_part,
    check_scales,
    checked,
    nibbles,
    part_info,
)
from octavo.frontend.quantized.packed_store import Found
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_GROUP = 32
_SCHEME = QuantScheme("f4e2m1", (1, _GROUP), "f8e8m0")


def find_mxfp4(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The expert stacks of a checkpoint of quant_method ``mxfp4``."""
    weights: dict[str, PackedMatrix] = {}
    for name in store.names():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            weights[stem] = Mxfp4Experts(store, stem)
    return Found(weights)


class Mxfp4Experts(PackedMatrix):
    """A stack of matrices. No scheme says a stack: it enters a graph dequantised."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self._blocks, self._scales = f"{name}_blocks", f"{name}_scales"
        super().__init__(store, name, (self._blocks, self._scales))

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups = self._sizes()
        return experts, groups * _GROUP, rows

    def scheme(self) -> None:
        return None

    def read(self) -> QuantTensor:
        raise OctavoError(f"{self.name} is a stack of experts, which no scheme says; read_experts")

    def read_experts(self) -> list[QuantTensor]:
        """Each expert's matrix ``[N, K]``."""
        sizes = self._sizes()
        bytes_ = (torch.uint8,)
        block_shape = (*sizes, _GROUP // 2)
        check_part(self.store, self._blocks, self.name, shape=block_shape, dtypes=bytes_)
        check_part(self.store, self._scales, self.name, shape=sizes, dtypes=bytes_)
        scales = self.store.read(self._scales).view(torch.float8_e8m0fnu)
        check_scales(self._scales, scales)
        blocks = self.store.read(self._blocks)
        return [
            checked(QuantTensor(_SCHEME, nibbles(codes, low_first=True).flatten(1), sides))
            for codes, sides in zip(blocks, scales, strict=True)
        ]

    def dequantize(self) -> Tensor:
        """f32[experts, K, N]"""
        made = torch.empty(self.shape)
        for place, matrix in zip(made, self.read_experts(), strict=True):
            place.copy_(matrix.dequantize().T)
        return made

    def _sizes(self) -> tuple[int, int, int]:
        shape = part_info(self.store, self._blocks, self.name).shape
        if len(shape) != 4:
            raise OctavoError(f"{self._blocks} has {len(shape)} dimensions, expected 4")
        return shape[0], shape[1], shape[2]
