"""Checkpoints of bitsandbytes: NF4, with absolute maxima that may be quantised again, and INT8.

NF4: ``weight`` u8 ``[N * K / 2, 1]``, the upper four bits first; ``weight.absmax`` for each block
of the flat matrix, f32, or u8 codes of ``weight.nested_quant_map`` with ``weight.nested_absmax``;
``weight.quant_state.bitsandbytes__nf4`` is JSON in bytes. INT8: ``weight`` i8 beside ``SCB`` f32
``[N]``, the largest magnitude of each row. Source: bitsandbytes, functional.QuantState.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import (
    PackedMatrix,
    check_group,
    check_part,
    check_scales,
    checked,
    nibbles,
    part_info,
)
from octavo.frontend.quantized.packed_store import Found, refuse_setting
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import CODE_FORMATS, QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_STATE = ".quant_state.bitsandbytes__"
_INT8_STEPS = 127


def find_bitsandbytes(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The quantised weights of a bitsandbytes checkpoint. Raises OctavoError."""
    weights: dict[str, PackedMatrix] = {}
    explained: dict[str, str] = {}
    for name in store.names():
        stem, is_state, kind = name.partition(_STATE)
        if is_state and kind != "nf4":
            raise refuse_setting("bitsandbytes", f"4-bit {kind}", "quantise with nf4 or to 8 bits")
        if is_state:
            weights[stem] = _Nf4Matrix(store, stem)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            weights[weight] = _Int8Matrix(store, weight, name)
        elif name.endswith(".weight_format"):
            _check_row_major(store, name)
            explained[name] = "says that the codes lie row by row"
    _check_none_is_bare(store, weights)
    return Found(weights, explained)


def _check_row_major(store: TensorStore, name: str) -> None:
    if int(store.read(name).flatten()[0]) != 0:
        raise refuse_setting("bitsandbytes", f"a layout of a GPU ({name})", "save it row by row")


def _check_none_is_bare(store: TensorStore, weights: Mapping[str, PackedMatrix]) -> None:
    """Codes whose scales are not there would otherwise be told as a wrong shape or dtype."""
    for name in store.names():
        dtype = store.info(name).dtype
        is_codes = dtype in (torch.uint8, torch.int8) and name.endswith(".weight")
        if is_codes and name not in weights:
            missing = f"{name}{_STATE}nf4" if dtype == torch.uint8 else f"{name[:-6]}SCB"
            part_info(store, missing, name)


class _Nf4Matrix(PackedMatrix):
    def __init__(self, store: TensorStore, name: str) -> None:
        nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        self._is_nested = any(side in store.names() for side in nested)
        sides = [f"{name}.absmax", f"{name}.quant_map", *(nested if self._is_nested else [])]
        super().__init__(store, name, (name, f"{name}{_STATE}nf4", *sides))

    @cached_property
    def _state(self) -> dict[str, Any]:
        key = f"{self.name}{_STATE}nf4"
        try:
            state = json.loads(bytes(self.store.read(key).tolist()))
            state["shape"] = tuple(int(size) for size in state["shape"])
            state["blocksize"] = int(state["blocksize"])
        except (ValueError, KeyError, TypeError):
            raise OctavoError(
                f"{key} is not the JSON that bitsandbytes writes; the checkpoint is damaged,"
                " download or export it again"
            ) from None
        return dict(state)

    @property
    def shape(self) -> tuple[int, int]:
        shape = self._state["shape"]
        if len(shape) != 2:
            raise OctavoError(f"{self.name} has {len(shape)} dimensions, expected 2")
        return shape[0], shape[1]

    def scheme(self) -> QuantScheme:
        return QuantScheme("nf4", (1, self._state["blocksize"]), "f32")

    def read(self) -> QuantTensor:
        rows, columns = self.shape
        block = self._state["blocksize"]
        # Blocks run over the flat matrix: in a row that they do not divide, they would cross rows.
        check_group(self.name, columns, block)
        half = (rows * columns // 2, 1)
        check_part(self.store, self.name, self.name, shape=half, dtypes=(torch.uint8,))
        self._check_table()
        codes = nibbles(self.store.read(self.name).flatten(), low_first=False)
        scales = self._read_scales(rows * columns // block)
        # A block of zeros has the largest magnitude zero.
        check_scales(f"{self.name}.absmax", scales, zero_is_sound=True)
        scales = scales.view(rows, columns // block)
        return checked(QuantTensor(self.scheme(), codes.view(rows, columns), scales))

    def _check_table(self) -> None:
        name = f"{self.name}.quant_map"
        check_part(self.store, name, self.name, shape=(16,), dtypes=(torch.float32,))
        if not torch.equal(self.store.read(name), torch.tensor(CODE_FORMATS["nf4"].table)):
            raise OctavoError(f"{name} is not the table of NF4; the format is a variant, refused")

    def _read_scales(self, blocks: int) -> Tensor:
        """f32[blocks]"""
        absmax = f"{self.name}.absmax"
        if not self._is_nested:
            check_part(self.store, absmax, self.name, shape=(blocks,), dtypes=(torch.float32,))
            return self.store.read(absmax)
        check_part(self.store, absmax, self.name, shape=(blocks,), dtypes=(torch.uint8,))
        size = int(self._state["nested_blocksize"])
        outer = self._read_side("nested_absmax", -(-blocks // size))
        check_scales(f"{self.name}.nested_absmax", outer, zero_is_sound=True)
        table = self._read_side("nested_quant_map", 256)
        wide = outer.repeat_interleave(size)[:blocks]
        return table[self.store.read(absmax).long()] * wide + float(self._state["nested_offset"])

    def _read_side(self, side: str, count: int) -> Tensor:
        name = f"{self.name}.{side}"
        check_part(self.store, name, self.name, shape=(count,), dtypes=(torch.float32,))
        return self.store.read(name)


class _Int8Matrix(PackedMatrix):
    """``code * SCB / 127``. The library multiplies by SCB first, then by 1/127: its float32 may
    differ in the last bit from the product with one scale."""

    def __init__(self, store: TensorStore, name: str, scales: str) -> None:
        super().__init__(store, name, (name, scales))
        self._scales = scales

    @property
    def shape(self) -> tuple[int, int]:
        shape = part_info(self.store, self.name, self.name).shape
        if len(shape) != 2:
            raise OctavoError(f"{self.name} has {len(shape)} dimensions, expected 2")
        return shape[0], shape[1]

    def scheme(self) -> QuantScheme:
        # No x=: the method keeps outliers of x whole, and a row rounded with them would lose most.
        return QuantScheme("int8", (1, None), "f32")

    def read(self) -> QuantTensor:
        rows, _ = self.shape
        check_part(self.store, self.name, self.name, dtypes=(torch.int8,))
        check_part(self.store, self._scales, self.name, shape=(rows,), dtypes=(torch.float32,))
        largest = self.store.read(self._scales)
        check_scales(self._scales, largest, zero_is_sound=True)
        scales = (largest / _INT8_STEPS).view(rows, 1)
        return checked(QuantTensor(self.scheme(), self.store.read(self.name), scales))
