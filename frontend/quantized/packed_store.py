"""A checkpoint's tensors with the quantised ones put together, each under its weight's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import PackedMatrix, check_scales, part_info
from octavo.frontend.weights import TensorInfo, TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What a format makes of a checkpoint.

    ``weights`` by their names in the model; ``explained`` are tensors that are left alone, with
    the reason; ``kv_scales`` are the stored names of the scales of the KV cache by the names that
    they go by, ``<path of the attention>.k_scale`` and ``.v_scale``.
    """

    weights: Mapping[str, PackedMatrix]
    explained: Mapping[str, str] = field(default_factory=dict)
    kv_scales: Mapping[str, str] = field(default_factory=dict)


class PackedStore:
    """A TensorStore in which a quantised weight is one tensor, and its parts are not seen.

    ``read`` gives f32, the exact value that codes and scales stand for; ``read_quantized`` gives
    these. ``packed`` are the names of the quantised weights; ``explained`` says what became of
    stored tensors that are no weights.
    """

    def __init__(self, stored: TensorStore, found: Found) -> None:
        self._stored = stored
        self._weights = dict(found.weights)
        self._kv_scales = dict(found.kv_scales)
        self.explained = dict(found.explained)
        hidden = {*self.explained, *self._kv_scales.values()}
        for name, weight in self._weights.items():
            for part in weight.parts:
                part_info(stored, part, name)
            if name in stored.names() and name not in weight.parts:
                raise OctavoError(
                    f"{name} is stored twice, as it is and quantised ({weight.parts[0]}); expected"
                    " it once; remove the other from the checkpoint"
                )
            hidden.update(weight.parts)
        self.packed: Collection[str] = self._weights.keys()
        self._plain = [name for name in stored.names() if name not in hidden]

    def names(self) -> Collection[str]:
        """Quantised weights, and every tensor that is not part of one."""
        return [*self._weights, *self._plain]

    def info(self, name: str) -> TensorInfo:
        """Shape, and float32 for a quantised weight: what `read` returns."""
        if name in self._weights:
            return TensorInfo(self._weights[name].shape, torch.float32)
        return self._stored.info(name)

    def read(self, name: str) -> Tensor:
        """The tensor in float."""
        if name in self._weights:
            return self._weights[name].dequantize()
        return self._stored.read(name)

    def scheme(self, name: str) -> QuantScheme | None:
        """How a weight is held; None for one that is not quantised."""
        return self._weights[name].scheme() if name in self._weights else None

    def columns(self, name: str) -> Tensor | None:
        """See PackedMatrix.columns; reads no codes."""
        return self._weights[name].columns() if name in self._weights else None

    def read_quantized(self, name: str) -> QuantTensor:
        """The weight as it is held, see PackedMatrix.read. Raises KeyError for one in float."""
        return self._weights[name].read()

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of the KV cache, f32: `<path of the attention>.k_scale` and `.v_scale`."""
        scales = {key: self._stored.read(name).float() for key, name in self._kv_scales.items()}
        for key, value in scales.items():
            check_scales(self._kv_scales[key], value)
        return scales


def read_setting(config: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A setting of quantization_config. Raises OctavoError where it is absent, or no ``kind``."""
    value = config.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise OctavoError(
            f"quantization_config has {name}={value!r}, expected a {kind.__name__}; config.json is"
            " incomplete, download or export it again"
        )
    return value


def refuse_setting(method: str, what: str, instead: str) -> OctavoError:
    """The error for a part of a known method that is not supported."""
    return OctavoError(f"quant_method {method} with {what} is not supported; {instead}")
