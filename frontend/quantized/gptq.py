"""GPTQ checkpoints: AutoGPTQ's layout, which GPTQModel and optimum write too.

``qweight`` i32 ``[K * bits / 32, N]`` packs codes along K, lowest bits first; ``qzeros``
``[groups, N * bits / 32]`` along N; ``scales`` ``[groups, N]``; ``g_idx`` i32 ``[K]`` is the group
of each column, in the order of activations when ``desc_act`` was set. The first version of the
format stores each zero less one. Source: GPTQModel, nn_modules/qlinear and
convert_gptq_v1_to_v2_format_module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    sort_columns,
    unpack_words,
)
from octavo.frontend.quantized.packed_store import Found, read_setting, refuse_setting
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_ONES = {4: 0x11111111, 8: 0x01010101}  # one in every field of a word


@dataclass(frozen=True)
class _Settings:
    bits: int
    group: int | None
    is_act_order: bool
    is_v1: bool


def find_gptq(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The quantised weights of a GPTQ checkpoint. Raises OctavoError for what is not supported."""
    settings = _settings(config)
    weights: dict[str, PackedMatrix] = {}
    for name in store.names():
        if name.endswith(".qweight"):
            stem = name.removesuffix(".qweight")
            weights[f"{stem}.weight"] = _GptqMatrix(store, stem, settings)
    return Found(weights)


def _settings(config: Mapping[str, Any]) -> _Settings:
    bits = read_setting(config, "bits", int)
    if bits not in _ONES:
        raise refuse_setting("gptq", f"bits={bits}", "quantise with 4 or 8 bits")
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise refuse_setting("gptq", f"checkpoint_format {form!r}", "save it as gptq or gptq_v2")
    if any(not str(pattern).startswith("-:") for pattern in config.get("dynamic") or ()):
        raise refuse_setting("gptq", "dynamic settings by module", "quantise all modules alike")
    group = read_setting(config, "group_size", int)
    is_act_order = bool(config.get("desc_act", False))
    return _Settings(bits, None if group == -1 else group, is_act_order, form == "gptq")


class _GptqMatrix(PackedMatrix):
    def __init__(self, store: TensorStore, stem: str, settings: _Settings) -> None:
        self._codes, self._zeros = f"{stem}.qweight", f"{stem}.qzeros"
        self._scales, self._groups = f"{stem}.scales", f"{stem}.g_idx"
        self._settings = settings
        has_groups = self._groups in store.names()
        super().__init__(
            store,
            f"{stem}.weight",
            (self._codes, self._zeros, self._scales, *([self._groups] if has_groups else [])),
        )
        if settings.is_act_order and settings.group is not None and not has_groups:
            raise OctavoError(
                f"{self._groups} is missing: config.json says desc_act, so the group of each"
                f" column of {self.name} has to be stored; download or export the checkpoint again"
            )

    @property
    def shape(self) -> tuple[int, int]:
        words = part_info(self.store, self._codes, self.name).shape
        if len(words) != 2:
            raise OctavoError(f"{self._codes} has {len(words)} dimensions, expected 2")
        return words[1], words[0] * 32 // self._settings.bits

    def scheme(self) -> QuantScheme:
        bits, group = self._settings.bits, self._settings.group
        scale = dtype_name(part_info(self.store, self._scales, self.name).dtype)
        if self._is_symmetric:
            return QuantScheme(f"int{bits}", (1, group), scale)
        return QuantScheme(f"uint{bits}", (1, group), scale, zero="u8")

    def columns(self) -> Tensor | None:
        columns = self.shape[1]
        if self._groups not in self.parts or self._settings.group is None:
            return None
        check_part(self.store, self._groups, self.name, shape=(columns,), dtypes=(torch.int32,))
        return sort_columns(self._groups, self.store.read(self._groups), self._settings.group)

    def read(self) -> QuantTensor:
        self._check()
        scheme, columns, bits = self.scheme(), self.columns(), self._settings.bits
        codes = unpack_words(self.store.read(self._codes), bits, 0).T
        if columns is not None:
            codes = codes[:, columns]
        codes = codes.contiguous()
        scales = self.store.read(self._scales).T.contiguous()
        check_scales(self._scales, scales)
        if scheme.zero is None:
            return checked(QuantTensor(scheme, signed(codes, bits), scales))
        zeros = self._read_zeros().T.contiguous()
        return checked(QuantTensor(scheme, codes, scales, zeros))

    def _check(self) -> None:
        rows, columns = self.shape
        check_group(self.name, columns, self._settings.group)
        groups = columns // (self._settings.group or columns)
        words = -(-rows * self._settings.bits // 32)
        check_part(self.store, self._codes, self.name, dtypes=(torch.int32,))
        check_part(self.store, self._scales, self.name, shape=(groups, rows), dtypes=SCALE_DTYPES)
        check_part(self.store, self._zeros, self.name, shape=(groups, words), dtypes=(torch.int32,))

    @cached_property
    def _is_symmetric(self) -> bool:
        """What the zeros say, not the config: some writers keep the middle and call it asymmetric,
        and the zeros are what every reader goes by."""
        self._check()
        return bool((self._read_zeros() == 2 ** (self._settings.bits - 1)).all())

    def _read_zeros(self) -> Tensor:
        """u8[groups, N]. The one is added to whole words, carry and all, as it was taken away."""
        words = self.store.read(self._zeros)
        if self._settings.is_v1:
            words = words + _ONES[self._settings.bits]
        return unpack_words(words, self._settings.bits, 1)[:, : self.shape[0]]
