"""Integer and MXFP4 matrices as compressed-tensors lays them; see compressed_tensors.py."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import (
    PackedMatrix,
    check_group,
    check_part,
    check_scales,
    checked,
    dtype_name,
    nibbles,
    part_info,
    signed,
    sort_columns,
    unpack_words,
)
from octavo.frontend.quantized.weight_settings import WeightSettings
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Integers(PackedMatrix):
    """What both layouts of integers share: scales, zeros and the scheme."""

    def __init__(
        self, store: TensorStore, stem: str, settings: WeightSettings, parts: tuple[str, ...]
    ) -> None:
        self._settings = settings
        self._scales = f"{stem}.weight_scale"
        self._zeros = f"{stem}.weight_zero_point"
        # A symmetric matrix may have zeros stored all the same; they say nothing.
        has_zeros = not settings.is_symmetric or self._zeros in store.names()
        sides = (self._scales, *([self._zeros] if has_zeros else []))
        super().__init__(store, f"{stem}.weight", (*parts, *sides))

    def scheme(self) -> QuantScheme:
        settings = self._settings
        scale = dtype_name(part_info(self.store, self._scales, self.name).dtype)
        x = settings.x if settings.x == "i8" else None
        x_block = settings.x_block if x else None
        if settings.is_symmetric:
            codes = f"int{settings.bits}"
            return QuantScheme(codes, settings.block, scale, x=x, x_block=x_block)
        codes = f"uint{settings.bits}"
        return QuantScheme(codes, settings.block, scale, zero="u8", x=x, x_block=x_block)

    def _side_shape(self) -> tuple[int, int]:
        rows, columns = self._matrix_shape()
        check_group(self.name, columns, self._settings.block[1])
        return self.scheme().scale_shape(rows, columns)

    def _matrix_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        return rows, columns

    def _made(self, unsigned: Tensor, zeros: Tensor | None) -> QuantTensor:
        scheme, sides = self.scheme(), self._side_shape()
        check_part(self.store, self._scales, self.name, dtypes=_FLOATS)
        scales = self.store.read(self._scales)
        if scales.numel() != sides[0] * sides[1] or (scales.dim() > 1 and scales.shape != sides):
            raise OctavoError(
                f"{self._scales} has the shape {list(scales.shape)}, expected {list(sides)} for"
                f" {self.name} of {list(self.shape)}; check the strategy and group size in"
                " config.json"
            )
        check_scales(self._scales, scales)
        scales = scales.view(sides)
        if zeros is None:
            codes = signed(unsigned, self._settings.bits)
            return checked(QuantTensor(scheme, codes, scales))
        return checked(QuantTensor(scheme, unsigned, scales, zeros))


class PackedIntegerMatrix(_Integers):
    """pack-quantized: codes of 4 or 8 bits in words."""

    def __init__(self, store: TensorStore, stem: str, settings: WeightSettings) -> None:
        self._packed, self._shape = f"{stem}.weight_packed", f"{stem}.weight_shape"
        self._groups = f"{stem}.weight_g_idx"
        groups = (self._groups,) if self._groups in store.names() else ()
        super().__init__(store, stem, settings, (self._packed, self._shape, *groups))

    @property
    def shape(self) -> tuple[int, int]:
        check_part(
            self.store, self._shape, self.name, shape=(2,), dtypes=(torch.int64, torch.int32)
        )
        rows, columns = self.store.read(self._shape).tolist()
        return rows, columns

    def columns(self) -> Tensor | None:
        group = self._settings.block[1]
        if self._groups not in self.parts or group is None:
            return None
        shape = (self._matrix_shape()[1],)
        check_part(self.store, self._groups, self.name, shape=shape, dtypes=(torch.int32,))
        groups = self.store.read(self._groups)
        if bool((groups == -1).all()):  # written, but no order was found
            return None
        return sort_columns(self._groups, groups, group)

    def read(self) -> QuantTensor:
        rows, columns = self._matrix_shape()
        bits = self._settings.bits
        self._check_words(self._packed, (rows, ceil(columns * bits / 32)))
        codes = unpack_words(self.store.read(self._packed), bits, 1)[:, :columns]
        order = self.columns()
        if order is not None:
            codes = codes[:, order]
        zeros = None
        if not self._settings.is_symmetric:
            sides = self._side_shape()
            self._check_words(self._zeros, (ceil(sides[0] * bits / 32), sides[1]))
            zeros = unpack_words(self.store.read(self._zeros), bits, 0)[: sides[0]].contiguous()
        return self._made(codes.contiguous(), zeros)

    def _check_words(self, name: str, shape: tuple[int, int]) -> None:
        check_part(self.store, name, self.name, shape=shape, dtypes=(torch.int32,))


class IntegerMatrix(_Integers):
    """int-quantized: codes of 8 bits as they are."""

    def __init__(self, store: TensorStore, stem: str, settings: WeightSettings) -> None:
        self._codes = f"{stem}.weight"
        super().__init__(store, stem, settings, (self._codes,))

    @property
    def shape(self) -> tuple[int, int]:
        shape = part_info(self.store, self._codes, self.name).shape
        if len(shape) != 2:
            raise OctavoError(f"{self.name} has {len(shape)} dimensions, expected 2")
        return shape[0], shape[1]

    def read(self) -> QuantTensor:
        check_part(self.store, self._codes, self.name, dtypes=(torch.int8,))
        zeros = None
        if not self._settings.is_symmetric:
            sides = self._side_shape()
            check_part(self.store, self._zeros, self.name, dtypes=(torch.int8,))
            zeros = _from_lowest(self.store.read(self._zeros)).view(sides)
        return self._made(_from_lowest(self.store.read(self._codes)), zeros)


def _from_lowest(codes: Tensor) -> Tensor:
    """Codes i8 as u8 that count from -128."""
    return (codes.to(torch.int16) + 128).to(torch.uint8)


class Mxfp4Matrix(PackedMatrix):
    """mxfp4-pack-quantized: e2m1 codes, two a byte with the lower first, and exponents."""

    def __init__(self, store: TensorStore, stem: str, settings: WeightSettings) -> None:
        self._packed, self._scales = f"{stem}.weight_packed", f"{stem}.weight_scale"
        super().__init__(store, f"{stem}.weight", (self._packed, self._scales))

    @property
    def shape(self) -> tuple[int, int]:
        shape = part_info(self.store, self._packed, self.name).shape
        return shape[0], shape[1] * 2

    def scheme(self) -> QuantScheme:
        return QuantScheme("f4e2m1", (1, 32), "f8e8m0")

    def read(self) -> QuantTensor:
        rows, columns = self.shape
        check_group(self.name, columns, 32)
        bytes_ = (torch.uint8,)
        check_part(self.store, self._packed, self.name, dtypes=bytes_)
        check_part(self.store, self._scales, self.name, shape=(rows, columns // 32), dtypes=bytes_)
        scales = self.store.read(self._scales).view(torch.float8_e8m0fnu)
        check_scales(self._scales, scales)
        codes = nibbles(self.store.read(self._packed), low_first=True)
        return checked(QuantTensor(self.scheme(), codes, scales))
