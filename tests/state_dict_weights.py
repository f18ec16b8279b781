"""A source of weights for tests: the state_dict of a real model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from octavo.frontend.weights import TensorInfo


class StateDictWeights:
    """The tensors of a Hugging Face model, and its computed buffers; counts what is loaded."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        self._buffers = dict(model.named_buffers())
        self.num_loads = 0

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(tuple(self._tensors[key].shape), self._tensors[key].dtype)

    def load(self, key: str) -> torch.Tensor:
        self.num_loads += 1
        return self._tensors[key].clone()

    def buffer(self, key: str) -> torch.Tensor:
        return self._buffers[key]
