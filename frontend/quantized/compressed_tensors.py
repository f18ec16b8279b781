"""Checkpoints of compressed-tensors, which llmcompressor writes.

``config_groups`` give settings to the modules that their ``targets`` match; how a module lies is
told by ``format``. Source: compressed-tensors, compressors/ and config/base.py.

- pack-quantized: ``weight_packed`` i32 ``[N, K * bits / 32]``, codes plus half their range along K,
  ``weight_scale`` ``[N, groups]``, ``weight_shape``; with zeros ``weight_zero_point`` i32
  ``[N * bits / 32, groups]``, and with activation order ``weight_g_idx`` i32 ``[K]``
- int-quantized: ``weight`` i8, ``weight_scale``; float-quantized: ``weight`` f8e4m3
- mxfp4-pack-quantized: ``weight_packed`` u8 ``[N, K / 2]``, ``weight_scale`` u8 exponents
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from octavo.frontend.quantized.compressed_integers import (
    IntegerMatrix,
    Mxfp4Matrix,
    PackedIntegerMatrix,
)
from octavo.frontend.quantized.fp8 import Fp8Matrix, activation_scales, kv_scale_names
from octavo.frontend.quantized.packed_matrix import PackedMatrix
from octavo.frontend.quantized.packed_store import Found, read_setting, refuse_setting
from octavo.frontend.quantized.weight_settings import WeightSettings
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError

_METHOD = "compressed-tensors"
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
)
_ENDINGS = (".weight_packed", ".weight_scale", ".weight")
_CODES = (torch.int8, torch.float8_e4m3fn)


def find_compressed(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The quantised weights of such a checkpoint. Raises OctavoError for what is not supported."""
    _check_config(config)
    groups = list(read_setting(config, "config_groups", dict).values())
    weights: dict[str, PackedMatrix] = {}
    for stem in _stems(store):
        settings = _settings_of(stem, groups, str(config.get("format")))
        weights[f"{stem}.weight"] = _matrix(store, stem, settings)
    return Found(weights, activation_scales(store), kv_scale_names(store))


def _check_config(config: Mapping[str, Any]) -> None:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise refuse_setting(_METHOD, f"sparsity {sparsity!r}", "export it without sparsity")
    if config.get("transform_config"):
        raise refuse_setting(_METHOD, "transform_config", "export it without rotations")
    status = config.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise refuse_setting(_METHOD, f"quantization_status {status!r}", "save it compressed")


def _stems(store: TensorStore) -> list[str]:
    """Modules that are quantised, in the store's order, once each."""
    stems = {
        name.removesuffix(ending): None
        for name in store.names()
        for ending in _ENDINGS
        if name.endswith(ending) and (ending != ".weight" or store.info(name).dtype in _CODES)
    }
    return list(stems)


def _settings_of(stem: str, groups: list[Mapping[str, Any]], default_format: str) -> WeightSettings:
    """The group whose target is the module's own name, else a pattern of it, else its class."""
    for matches in (_is_name, _is_pattern, _is_class):
        for group in groups:
            if any(matches(str(target), stem) for target in group.get("targets", ())):
                form = str(group.get("format") or default_format)
                if form not in _FORMATS:
                    raise refuse_setting(_METHOD, f"format {form!r}", f"use {_FORMATS[0]}")
                return WeightSettings.parse(stem, form, group)
    raise OctavoError(
        f"{stem} is quantised, but no target of config_groups in config.json matches it;"
        " config.json and the weights are of different checkpoints"
    )


def _is_name(target: str, stem: str) -> bool:
    return target == stem


def _is_pattern(target: str, stem: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), stem) is not None


def _is_class(target: str, stem: str) -> bool:
    return target == "Linear"  # every matrix that these formats pack is one


def is_ignored(stem: str, config: Mapping[str, Any]) -> bool:
    """Whether the ``ignore`` list names a module."""
    patterns = [str(pattern) for pattern in config.get("ignore") or ()]
    return any(_is_name(pattern, stem) or _is_pattern(pattern, stem) for pattern in patterns)


def _matrix(store: TensorStore, stem: str, settings: WeightSettings) -> PackedMatrix:
    if settings.form == "mxfp4-pack-quantized":
        return Mxfp4Matrix(store, stem, settings)
    if settings.form == "pack-quantized":
        return PackedIntegerMatrix(store, stem, settings)
    if settings.kind == "int":
        return IntegerMatrix(store, stem, settings)
    return Fp8Matrix(
        store,
        f"{stem}.weight",
        f"{stem}.weight_scale",
        settings.block,
        settings.x_block,
        rounds_x=settings.x == "f8e4m3",
    )
