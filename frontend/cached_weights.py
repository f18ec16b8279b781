"""Checkpoint tensors in the compiled dtype, kept while they fit a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from octavo.frontend.refused import is_out_of_memory
from octavo.frontend.weights import TensorInfo, WeightSource
from octavo.ir.errors import OctavoError

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
        """A tensor that is only to be read. Raises what the source raises.

        When memory does not suffice, that is an OctavoError with the tensor's name.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        try:
            tensor = self._converted(key)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            info = self._source.info(key)
            raise OctavoError(
                f"not enough memory for {key}: {list(info.shape)} takes"
                f" {info.num_bytes / 2**30:.1f} GiB in"
                f" {str(info.dtype).removeprefix('torch.')}; check the sizes in config.json"
            ) from error
        self._hold(key, tensor)
        return tensor

    def _converted(self, key: str) -> Tensor:
        tensor = self._source.load(key)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _hold(self, key: str, tensor: Tensor) -> None:
        if tensor.nbytes > self._limit_bytes:
            return
        self._held[key] = tensor
        self._held_bytes += tensor.nbytes
        while self._held_bytes > self._limit_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= dropped.nbytes
