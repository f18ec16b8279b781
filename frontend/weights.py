"""What a source of weights offers to the rest of the compiler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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

    `keys()` lists only what is stored: of a tied pair usually one.
    """

    def __init__(self, stored: WeightSource, ties: dict[str, str]) -> None:
        self._stored = stored
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
