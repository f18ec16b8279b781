"""Evaluation of the weights region: lazily, and within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.ir.bind import check_result
from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import op_def
from octavo.ir.ops.quant import QUANT_SOURCED
from octavo.ir.ops.registry import EVALUATION_ERRORS, reason
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import tensor_type

DEFAULT_LIMIT_BYTES = 1 << 30


class WeightSource(Protocol):
    """Whoever holds the model's tensors."""

    def load(self, key: str) -> Tensor:
        """A tensor of the checkpoint, by its name there."""

    def buffer(self, key: str) -> Tensor:
        """A buffer that the model computes when it is built."""

    def load_quantized(self, key: str) -> QuantTensor:
        """A matrix that the checkpoint, or a calibration, holds quantised."""


class WeightCache:
    """The values of a graph's weights region, computed when first asked for.

    Those least recently used are dropped beyond ``limit_bytes`` and computed again when needed.
    """

    def __init__(
        self, graph: Graph, source: WeightSource, limit_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        self.graph = graph
        self.source = source
        self.limit_bytes = limit_bytes
        self._held: OrderedDict[Value, Tensor | QuantTensor] = OrderedDict()
        self._held_bytes = 0

    def get(self, value: Value) -> Tensor | QuantTensor:
        """A weight's tensor or quantised matrix. Raises VerifyError for one of another type."""
        if value in self._held:
            self._held.move_to_end(value)
            return self._held[value]
        node = value.producer
        assert node is not None, f"{value} is no weight"
        assert value.is_weight, f"{value} is no weight"
        with torch.no_grad():
            results = self._evaluate(node)
        for output, tensor in zip(node.outputs, results, strict=True):
            check_result(output, tensor, {})
            self._hold(output, tensor)
        return results[node.outputs.index(value)]

    def _evaluate(self, node: Node) -> Sequence[Tensor | QuantTensor]:
        if node.op == "checkpoint":
            return [self._loaded(node)]
        if node.op == "buffer":
            return [self.source.buffer(node.attrs["key"])]
        if node.op in QUANT_SOURCED:
            return [self.source.load_quantized(node.attrs["key"])]
        operands = [None if value is None else self.get(value) for value in node.inputs]
        try:
            found = op_def(node.op).evaluate(*operands, **node.attrs)
        except EVALUATION_ERRORS as error:
            raise VerifyError(f"{node} fails: {reason(error)}") from error
        return list(found) if isinstance(found, tuple | list) else [found]

    def _loaded(self, node: Node) -> Tensor:
        declared = tensor_type(node.output.type)
        tensor = self.source.load(node.attrs["key"])
        if tuple(tensor.shape) != declared.shape:
            raise VerifyError(
                f"{node.output}: the checkpoint's {node.attrs['key']!r} has the shape "
                f"{list(tensor.shape)}, expected {list(declared.shape)}; is it another model's?"
            )
        return tensor.to(declared.torch_dtype)

    def _hold(self, value: Value, tensor: Tensor | QuantTensor) -> None:
        if tensor.nbytes > self.limit_bytes or value in self._held:
            return
        self._held[value] = tensor
        self._held_bytes += tensor.nbytes
        while self._held_bytes > self.limit_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= dropped.nbytes
