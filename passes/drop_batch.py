"""The batch dim of the trace goes: all sequences of a step lie end to end in its one row.

Each value with a leading dim of 1 gets a counterpart without it, op by op from the parameters down
to the logits. An op that cannot do without reads its operands with the dim put back.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import infer_types
from octavo.ir.types import Type
from octavo.passes.base import Report, register_pass
from octavo.passes.batch_rules import Attrs, is_on_batch, narrowed_attrs


@register_pass("drop-batch")
def drop_batch(graph: Graph, report: Report) -> int:
    """Take the leading 1 off the parameters and off all that is computed from them."""
    wide = [value for value in graph.inputs if _has_batch(value)]
    if not wide or not graph.nodes:
        return 0
    narrowing = _Narrowing(graph, report)
    nodes = list(graph.nodes)
    for value in wide:
        narrowing.narrow_parameter(value, nodes[0])
    count = sum([narrowing.visit(node) for node in nodes])
    narrowing.finish()
    return count + len(wide)


def _has_batch(value: Value) -> bool:
    return value.tensor.rank > 1 and value.shape[0] == 1


class _Narrowing:
    """``narrow`` maps each value with the batch dim to its counterpart without.

    ``restored`` holds those that had to be made again with it.
    """

    def __init__(self, graph: Graph, report: Report) -> None:
        self.graph = graph
        self.report = report
        self.narrow: dict[Value, Value] = {}
        self.restored: dict[Value, Value] = {}

    def narrow_parameter(self, value: Value, first: Node) -> None:
        """Change the type of a parameter, and put the dim back for those who read it."""
        users = self.graph.users(value)
        value.type = value.tensor.with_shape(*value.shape[1:])
        wide = self._unsqueeze(first, value, like=value)
        self.graph.replace_uses(value, wide, users)
        self.narrow[wide] = value

    def visit(self, node: Node) -> bool:
        """Make a node's results without the dim, if its operands have counterparts without."""
        if not any(value in self.narrow for value in node.operands):
            return self._begin(node)
        if is_on_batch(node):
            self._pass_by(node)
            return True
        # Attention is left to page-attention, which expects the layout it has.
        if node.op != "attention" and self._rebuild(node):
            return True
        self.graph.set_inputs(node, [value and self._restore(node, value) for value in node.inputs])
        for value in filter(_has_batch, node.outputs):
            squeeze = self.graph.insert_after(node, "squeeze", value, dim=0)
            self.narrow[value], self.restored[value] = squeeze.output, value
        return False

    def _begin(self, node: Node) -> bool:
        """A view that gives a value its batch dim anew, after the model has flattened it."""
        if node.op not in ("reshape", "unsqueeze") or not _has_batch(node.output):
            return False
        x = node.operand(0)
        if x.is_weight:
            return False
        if node.op == "reshape":
            shape = node.attrs["shape"][1:]
            made = self.graph.insert_before(node, "reshape", x, shape=shape)
            self.narrow[node.output] = made.output
            return True
        if is_on_batch(node):
            self.narrow[node.output] = x
            return True
        return False

    def finish(self) -> None:
        """Return the counterparts, and give them the names of what they replace."""
        for old, new in self.narrow.items():
            if self.restored.get(old) is not old:
                self.graph.replace_all(old, new)
            elif old in self.graph.outputs:
                outputs = self.graph.outputs
                self.graph.outputs = [new if value is old else value for value in outputs]
        self.graph.sweep()

    def _pass_by(self, node: Node) -> None:
        """A view of the batch dim alone is the counterpart of its operand, or of its result."""
        x, out = node.operand(0), node.outputs[0]
        if node.op == "unsqueeze":
            self.narrow[out] = self._restore(node, x)
        elif node.op == "slice":
            self.narrow[out] = self.narrow[x]
        else:
            self.graph.replace_all(out, self.narrow[x])

    def _rebuild(self, node: Node) -> bool:
        attrs = narrowed_attrs(node)
        if attrs is None:
            return self.report.missed(node, f"no rule takes the batch dim off {node.op}")
        rank = max(value.tensor.rank for value in node.operands)
        inputs = [value and self._operand(node, value, rank) for value in node.inputs]
        if not _gives_counterparts(node, inputs, attrs):
            return self.report.missed(node, f"{node.op} makes something of the batch dim")
        names = [value.name for value in node.outputs]
        made = self.graph.insert_before(node, node.op, *inputs, name=names, **attrs)
        for old, new in zip(node.outputs, made.outputs, strict=True):
            new.origin = old.origin
            if new.type == old.type:
                self.graph.replace_all(old, new)
            else:
                self.narrow[old] = new
        return True

    def _operand(self, node: Node, value: Value, rank: int) -> Value:
        """An operand without the dim; where one of lower rank has none, broadcasting adds it."""
        if value in self.narrow:
            return self.narrow[value]
        if not _has_batch(value) or value.tensor.rank < rank:
            return value
        if value.is_weight:
            return self.graph.constant("squeeze", value, dim=0, origin=value.origin)
        return self.graph.insert_before(
            node, "squeeze", value, dim=0, name=value.name, origin=value.origin
        ).output

    def _restore(self, anchor: Node, value: Value) -> Value:
        if value not in self.narrow:
            return value
        if value not in self.restored:
            self.restored[value] = self._unsqueeze(anchor, self.narrow[value], like=value)
        return self.restored[value]

    def _unsqueeze(self, anchor: Node, value: Value, like: Value) -> Value:
        return self.graph.insert_before(
            anchor, "unsqueeze", value, dim=0, name=like.name, origin=like.origin
        ).output


def _gives_counterparts(node: Node, inputs: Sequence[Value | None], attrs: Attrs) -> bool:
    """True when each result is what it was, or that without its leading 1."""
    operands = [value.type if value is not None else None for value in inputs]
    try:
        types = infer_types(node.op, operands, attrs)
    except VerifyError:
        return False
    return all(made in _allowed(value) for made, value in zip(types, node.outputs, strict=True))


def _allowed(value: Value) -> list[Type]:
    narrow = [value.tensor.with_shape(*value.shape[1:])] if _has_batch(value) else []
    return [value.type, *narrow]
