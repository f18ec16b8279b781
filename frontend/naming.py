"""Checkpoint names to model names, by transformers' own conversion tables.

Checkpoints keep the names, and the layout of experts and fused projections, that they were
published with; transformers renames and converts on load (transformers.core_model_loading). Here
the same transforms are planned from shapes alone, on the meta device, and carried out for one
tensor at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from octavo.frontend.quantized.packed_store import PackedStore
from octavo.frontend.weights import TensorInfo, TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor


@dataclass
class _Conversion:
    """A converter of transformers and the tensors, in order, that it makes `first_key` (and"
    " more) of."""

    converter: Any
    first_key: str
    sources: list[tuple[str, str]] = field(default_factory=list)  # checkpoint name, pattern


class NamedWeights:
    """A WeightSource over a TensorStore; `model` is the meta-device model whose names are used.

    A QuantizedSource too: of a PackedStore, weights that keep their tensor keep their codes.

    A tensor that several checkpoint tensors make up (stacked experts) is assembled when it is
    loaded; one that is cut out of a larger tensor costs a read of the larger one. Raises
    OctavoError when two tensors claim one name or a conversion does not fit.
    """

    def __init__(self, store: TensorStore, model: Any, transforms: list[Any]) -> None:
        self._store = store
        self._packed = store if isinstance(store, PackedStore) else None
        self._model = model
        self._plain: dict[str, str] = {}
        self._converted: dict[str, tuple[_Conversion, TensorInfo]] = {}
        for conversion in self._plan(transforms):
            self._add_conversion(conversion)

    def _plan(self, transforms: list[Any]) -> list[_Conversion]:
        """Sort the checkpoint's names into plain ones and those that need a conversion."""
        # The transforms remember whether they matched, so each plan works on its own copy.
        transforms = deepcopy(transforms)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        expected = self._model.state_dict()
        prefix = self._model.base_model_prefix
        conversions: dict[str, _Conversion] = {}
        for name in sorted(self._store.names(), key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if key not in expected and name in expected:
                key, pattern = name, None
            if key not in expected:
                self._claim(name, name)
            elif pattern is None:
                self._claim(key, name)
            else:
                conversion = conversions.setdefault(key, _Conversion(by_pattern[pattern], key))
                conversion.sources.append((name, pattern))
        return list(conversions.values())

    def _claim(self, key: str, name: str) -> None:
        if key in self._plain:
            raise OctavoError(
                f"tensors '{self._plain[key]}' and '{name}' are both '{key}' of the model;"
                " expected one; remove the other from the checkpoint"
            )
        self._plain[key] = name

    def _add_conversion(self, conversion: _Conversion) -> None:
        for key, value in self._convert(conversion, on_meta=True).items():
            if key in self._plain or key in self._converted:
                raise OctavoError(
                    f"tensor '{conversion.sources[0][0]}' makes '{key}', which another tensor of"
                    " the checkpoint makes too; expected one; remove the other"
                )
            self._converted[key] = (conversion, TensorInfo(tuple(value.shape), value.dtype))

    def _convert(self, conversion: _Conversion, *, on_meta: bool) -> dict[str, torch.Tensor]:
        converter = deepcopy(conversion.converter)
        for name, pattern in conversion.sources:
            # transformers calls a thunk where it would wait for a loading thread.
            read = partial(self._meta if on_meta else self._store.read, name)
            converter.add_tensor(conversion.first_key, name, pattern, read)
        try:
            made = converter.convert(conversion.first_key, self._model, self._model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise OctavoError(
                f"tensor '{conversion.sources[0][0]}' (and {len(conversion.sources) - 1} more)"
                f" cannot be made into '{conversion.first_key}': {str(error).splitlines()[0]};"
                " check that config.json belongs to these weights"
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def _meta(self, name: str) -> torch.Tensor:
        info = self._store.info(name)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def keys(self) -> Collection[str]:
        return [*self._plain, *self._converted]

    def info(self, key: str) -> TensorInfo:
        if key in self._converted:
            return self._converted[key][1]
        return self._store.info(self._plain[key])

    def load(self, key: str) -> torch.Tensor:
        if key in self._converted:
            return self._convert(self._converted[key][0], on_meta=False)[key].contiguous()
        return self._store.read(self._plain[key])

    def scheme(self, key: str) -> QuantScheme | None:
        """None too for what several tensors make up: their codes are not put together."""
        if self._packed is None or key not in self._plain:
            return None
        return self._packed.scheme(self._plain[key])

    def columns(self, key: str) -> torch.Tensor | None:
        if self._packed is None or key not in self._plain:
            return None
        return self._packed.columns(self._plain[key])

    def load_quantized(self, key: str) -> QuantTensor:
        if self._packed is None:
            raise KeyError(key)
        return self._packed.read_quantized(self._plain[key])

    def kv_scales(self) -> dict[str, torch.Tensor]:
        return {} if self._packed is None else self._packed.kv_scales()

    def notices(self) -> list[str]:
        if self._packed is None:
            return []
        converted = {name for made, _ in self._converted.values() for name, _ in made.sources}
        left = [name for name in self._packed.packed if self._is_numbers(name, converted)]
        if not left:
            return []
        return [f"{len(left)} quantised tensors are read as numbers (such as {left[0]})"]

    def _is_numbers(self, name: str, converted: set[str]) -> bool:
        assert self._packed is not None, "asked of what is packed"
        return name in converted or self._packed.scheme(name) is None
