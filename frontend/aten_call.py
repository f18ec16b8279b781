"""One ATen call of an exported program, as the import rules see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from octavo.frontend.sizes import Sizes
from octavo.frontend.value_names import value_name
from octavo.ir.graph import Graph, Origin, Value
from octavo.ir.types import Dim, TensorType


@dataclass
class AtenCall:
    """A node with its arguments by their names in the schema, and a way to emit IR for it."""

    graph: Graph
    node: fx.Node
    value_of: Callable[[fx.Node], Value]
    sizes: Sizes
    origin: Origin
    prefix: str

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument as fx has it, defaults filled in."""
        values = {}
        for index, argument in enumerate(self.node.target._schema.arguments):  # type: ignore[union-attr]
            if index < len(self.node.args):
                values[argument.name] = self.node.args[index]
            elif argument.name in self.node.kwargs:
                values[argument.name] = self.node.kwargs[argument.name]
            else:
                values[argument.name] = argument.default_value
        return values

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def is_tensor(self, name: str) -> bool:
        """True when the argument is a tensor; PyTorch takes numbers in its place."""
        value = self[name]
        return isinstance(value, fx.Node) and isinstance(value.meta["val"], Tensor)

    def tensor(self, name: str) -> Value:
        """A tensor argument."""
        return self.value_of(self[name])

    def optional(self, name: str) -> Value | None:
        """A tensor argument that may be absent."""
        return self.value_of(self[name]) if self[name] is not None else None

    def dim(self, name: str) -> Dim:
        """A size argument."""
        return self.sizes.dim(self[name])

    @property
    def result_types(self) -> tuple[TensorType, ...]:
        """The types that the trace saw."""
        value = self.node.meta["val"]
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(self.sizes.type(item) for item in items if isinstance(item, Tensor))

    @property
    def result_type(self) -> TensorType:
        """The type that the trace saw of the only result."""
        (only,) = self.result_types
        return only

    def fits(self, result: Value | Sequence[Value]) -> bool:
        """True when the inferred types are those that the trace saw."""
        values = [result] if isinstance(result, Value) else result
        return tuple(value.type for value in values) == self.result_types

    def emit(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Append a node with one result, named after the module and the op."""
        return self.emit_all(op, *inputs, **attrs)[0]

    def emit_all(self, op: str, *inputs: Value | None, **attrs: Any) -> list[Value]:
        """Append a node, whatever the number of its results."""
        name = value_name(self.origin.module, op, self.prefix)
        return self.graph.append(op, *inputs, name=name, origin=self.origin, **attrs).outputs
