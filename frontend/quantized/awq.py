"""AWQ checkpoints in AutoAWQ's GEMM layout.

``qweight`` i32 ``[K, N / 8]`` and ``qzeros`` ``[groups, N / 8]`` pack eight columns a word in the
order 0, 2, 4, 6, 1, 3, 5, 7; ``scales`` f16 ``[groups, N]``. Source: AutoAWQ, WQLinear_GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import (
    SCALE_DTYPES,
    PackedMatrix,
    check_group,
    check_part,
    check_scales,
    checked,
    dtype_name,
    part_info,
    signed,
    unpack_words,
)
from octavo.frontend.quantized.packed_store import Found, read_setting, refuse_setting
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_BITS = 4
_PER_WORD = 32 // _BITS
# Field i of a word holds column order[i]; this is where column i lies.
_FIELD_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def find_awq(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The quantised weights of an AWQ checkpoint. Raises OctavoError for what is not supported."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise refuse_setting("awq", f"version {version!r}", "export it as version gemm")
    bits = read_setting(config, "bits" if "bits" in config else "w_bit", int)
    if bits != _BITS:
        raise refuse_setting("awq", f"bits={bits}", "quantise with 4 bits")
    name_of_group = "group_size" if "group_size" in config else "q_group_size"
    group = read_setting(config, name_of_group, int)
    weights: dict[str, PackedMatrix] = {}
    for name in store.names():
        if name.endswith(".qweight"):
            stem = name.removesuffix(".qweight")
            weights[f"{stem}.weight"] = _AwqMatrix(store, stem, None if group == -1 else group)
    return Found(weights)


class _AwqMatrix(PackedMatrix):
    def __init__(self, store: TensorStore, stem: str, group: int | None) -> None:
        self._codes, self._zeros = f"{stem}.qweight", f"{stem}.qzeros"
        self._scales = f"{stem}.scales"
        self._group = group
        super().__init__(store, f"{stem}.weight", (self._codes, self._zeros, self._scales))

    @property
    def shape(self) -> tuple[int, int]:
        words = part_info(self.store, self._codes, self.name).shape
        if len(words) != 2:
            raise OctavoError(f"{self._codes} has {len(words)} dimensions, expected 2")
        return words[1] * _PER_WORD, words[0]

    def scheme(self) -> QuantScheme:
        scale = dtype_name(part_info(self.store, self._scales, self.name).dtype)
        if self._is_symmetric:
            return QuantScheme("int4", (1, self._group), scale)
        return QuantScheme("uint4", (1, self._group), scale, zero="u8")

    def read(self) -> QuantTensor:
        self._check()
        scheme = self.scheme()
        codes = _unpack(self.store.read(self._codes))
        scales = self.store.read(self._scales).T.contiguous()
        check_scales(self._scales, scales)
        if scheme.zero is None:
            return checked(QuantTensor(scheme, signed(codes, _BITS), scales))
        return checked(QuantTensor(scheme, codes, scales, _unpack(self.store.read(self._zeros))))

    def _check(self) -> None:
        rows, columns = self.shape
        check_group(self.name, columns, self._group)
        groups = columns // (self._group or columns)
        integers = (torch.int32,)
        check_part(self.store, self._codes, self.name, dtypes=integers)
        check_part(self.store, self._scales, self.name, shape=(groups, rows), dtypes=SCALE_DTYPES)
        words = (groups, rows // _PER_WORD)
        check_part(self.store, self._zeros, self.name, shape=words, dtypes=integers)

    @cached_property
    def _is_symmetric(self) -> bool:
        self._check()
        return bool((_unpack(self.store.read(self._zeros)) == 2 ** (_BITS - 1)).all())


def _unpack(words: Tensor) -> Tensor:
    """``[N, rows]`` u8 from words ``[rows, N / 8]``."""
    fields = unpack_words(words, _BITS, 1).view(words.shape[0], -1, _PER_WORD)
    return fields[:, :, list(_FIELD_OF_COLUMN)].flatten(1).T.contiguous()
