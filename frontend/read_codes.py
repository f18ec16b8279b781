"""Matrices that the checkpoint holds quantised, in a graph that was traced with float ones.

    @gate.weight: bf16[128, 64] = checkpoint(key="gate.weight")

becomes the dequantisation of what the checkpoint has. Where columns of equal scale were brought
together (GPTQ's activation order), the linears that read it read the columns of x in that order:

    @gate.weight.codes: int4<1x32, f16>[128, 64] = quantized_checkpoint(key="gate.weight", ...)
    @gate.weight: bf16[128, 64] = dequantize(@gate.weight.codes, dtype="bf16")
    %x.sorted: bf16[1, T, 64] = gather_columns(%x, @columns)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from octavo.frontend.weights import QuantizedSource, TiedWeights
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.types import TensorType

_LINEAR = "linear"


def read_codes(graph: Graph, source: QuantizedSource) -> dict[str, Tensor]:
    """Read the checkpoint's codes; returns the tensors behind the ``buffer(key=)`` nodes added.

    A matrix whose columns are in another order, and that something else than a linear reads, stays
    in float. Raises OctavoError where the checkpoint is damaged.
    """
    orders = _Orders(graph)
    for node in list(graph.weight_nodes):
        if node.op == "checkpoint" and len(node.output.shape) == 2:
            _read(graph, source, node, orders)
    graph.sweep()
    return orders.buffers


def holds_codes(source: TiedWeights) -> bool:
    """Whether anything in a checkpoint is quantised, with a scheme or without."""
    return bool(source.notices()) or any(source.scheme(key) for key in source.keys())


@dataclass
class _Orders:
    """The orders of columns in a graph, each once, and the values that are gathered in them."""

    graph: Graph
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[bytes, Value] = field(default_factory=dict)
    _gathered: dict[tuple[Value, Value], Value] = field(default_factory=dict)

    def value(self, weight: Value, key: str, columns: Tensor) -> Value:
        """Siblings have one order, and then read one gathered x: they can still be merged."""
        digest = columns.numpy().tobytes()
        if digest not in self._known:
            buffer, name = f"{key}.columns", f"{weight.name}.columns"
            self.buffers[buffer] = columns
            vector = TensorType("i64", tuple(columns.shape))
            made = self.graph.constant("buffer", key=buffer, type=vector, name=name)
            self._known[digest] = made
        return self._known[digest]

    def gather(self, x: Value, columns: Value) -> Value:
        if (x, columns) not in self._gathered:
            first = next(node for node in self.graph.nodes if x in node.inputs)
            name = f"{x.name}.sorted"
            node = self.graph.insert_before(
                first, "gather_columns", x, columns, name=name, origin=x.origin
            )
            self._gathered[x, columns] = node.output
        return self._gathered[x, columns]


def _read(graph: Graph, source: QuantizedSource, node: Node, orders: _Orders) -> None:
    key, weight = node.attrs["key"], node.output
    scheme = source.scheme(key)
    if scheme is None:
        return
    columns = source.columns(key)
    readers = graph.users(weight)
    if columns is not None:
        if not all(_is_matrix_of(reader, weight) for reader in readers):
            return
        order = orders.value(weight, key, columns)
        for reader in readers:
            x = orders.gather(reader.operand(0), order)
            graph.set_inputs(reader, [x, *reader.inputs[1:]])
    codes = graph.insert_before(
        node,
        "quantized_checkpoint",
        key=key,
        scheme=str(scheme),
        shape=tuple(weight.shape),
        name=f"{weight.name}.codes",
    )
    made = graph.insert_before(node, "dequantize", codes.output, dtype=weight.dtype)
    graph.replace_all(weight, made.output)


def _is_matrix_of(reader: Node, weight: Value) -> bool:
    """Whether a reader multiplies x by the weight, and does nothing else with it."""
    return reader.op == _LINEAR and reader.inputs[1] is weight and reader.inputs[0] is not weight
