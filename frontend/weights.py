"""What a source of weights offers to the rest of the compiler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor as `load` returns it, known without reading its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """Tensors by the names of the Hugging Face model's `state_dict`, read one at a time.

    A name that the model does not know (an extra tensor) is listed too, so that accounting sees it.
    """

    def keys(self) -> Collection[str]:
        """Every tensor that is stored, once each."""
        ...

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of `load(key)`; reads no data. Raises KeyError for an unknown name."""
        ...

    def load(self, key: str) -> torch.Tensor:
        """A fresh CPU tensor. Nothing is kept open or cached. Raises KeyError, OctavoError."""
        ...


class QuantizedWeights(Protocol):
    """Matrices as a checkpoint holds them quantised, by the names that the graph reads them by."""

    def load_quantized(self, key: str) -> QuantTensor:
        """A matrix, read now. Raises KeyError, OctavoError."""
        ...


@runtime_checkable
class QuantizedSource(QuantizedWeights, Protocol):
    """What a WeightSource offers besides when its checkpoint is quantised.

    ``info`` and ``load`` of the same source give such a weight in f32, exactly what codes and
    scales stand for, so that whatever knows no schemes goes on as with any checkpoint.
    """

    def scheme(self, key: str) -> QuantScheme | None:
        """How a weight is held; None where `load` is all there is. May read small tensors."""
        ...

    def columns(self, key: str) -> torch.Tensor | None:
        """i64[K] where columns of equal scale were brought together: column ``j`` of the codes is
        multiplied by column ``columns[j]`` of x. None: by column ``j``. Reads no codes."""
        ...

    def kv_scales(self) -> dict[str, torch.Tensor]:
        """Scales of the KV cache, f32: ``<path of the attention>.k_scale`` and ``.v_scale``."""
        ...

    def notices(self) -> list[str]:
        """What is stored quantised but has no scheme, in lines for the user."""
        ...


class TensorStore(Protocol):
    """Like WeightSource, by the names that stand in the file."""

    def names(self) -> Collection[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str) -> torch.Tensor: ...


def tied_names(model: Any) -> dict[str, str]:
    """Which `state_dict` names are another's tensor, `{alias: owner}`, as transformers ties"
    " them."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


class TiedWeights:
    """A WeightSource in which a tied tensor can be asked for by either of its names.

    It is a QuantizedSource too; of one that is not, all is in float. `keys()` lists only what is
    stored: of a tied pair usually one.
    """

    def __init__(self, stored: WeightSource, ties: dict[str, str]) -> None:
        self._stored = stored
        self._quantized = stored if isinstance(stored, QuantizedSource) else None
        present = set(stored.keys())
        self._stored_name: dict[str, str] = {}
        for alias, owner in ties.items():
            if alias not in present and owner in present:
                self._stored_name[alias] = owner
            elif owner not in present and alias in present:
                self._stored_name[owner] = alias

    def keys(self) -> Collection[str]:
        return self._stored.keys()

    def info(self, key: str) -> TensorInfo:
        return self._stored.info(self._stored_name.get(key, key))

    def load(self, key: str) -> torch.Tensor:
        return self._stored.load(self._stored_name.get(key, key))

    def scheme(self, key: str) -> QuantScheme | None:
        key = self._stored_name.get(key, key)
        return None if self._quantized is None else self._quantized.scheme(key)

    def columns(self, key: str) -> torch.Tensor | None:
        key = self._stored_name.get(key, key)
        return None if self._quantized is None else self._quantized.columns(key)

    def load_quantized(self, key: str) -> QuantTensor:
        if self._quantized is None:
            raise KeyError(key)
        return self._quantized.load_quantized(self._stored_name.get(key, key))

    def kv_scales(self) -> dict[str, torch.Tensor]:
        return {} if self._quantized is None else self._quantized.kv_scales()

    def notices(self) -> list[str]:
        return [] if self._quantized is None else self._quantized.notices()
