"""Checkpoint tensors in the compiled dtype, kept while they fit a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from octavo.frontend.weights import TensorInfo, WeightSource

DEFAULT_LIMIT_BYTES = 1 << 30


class CachedWeights:
    """A WeightSource in front of another: converts floats to a dtype, keeps those used last.

    Readers share the tensors, so nobody may write to them.
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, limit_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        self.dtype = dtype
        self._source = source
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        self._held_bytes = 0

    def keys(self) -> Collection[str]:
        """As the source has them."""
        return self._source.keys()

    def info(self, key: str) -> TensorInfo:
        """As the source says, with the dtype of this one."""
        info = self._source.info(key)
        return TensorInfo(info.shape, self.dtype if info.dtype.is_floating_point else info.dtype)

    def load(self, key: str) -> Tensor:
        """A tensor that is only to be read. Raises what the source raises."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        tensor = self._source.load(key)
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        self._hold(key, tensor)
        return tensor

    def _hold(self, key: str, tensor: Tensor) -> None:
        if tensor.nbytes > self._limit_bytes:
            return
        self._held[key] = tensor
        self._held_bytes += tensor.nbytes
        while self._held_bytes > self._limit_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= dropped.nbytes
