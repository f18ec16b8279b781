"""What depends on nothing but constants is made once, when the model is compiled."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.ir.types import SymDim
from octavo.passes.base import Report, register_pass
from octavo.passes.traits import is_pure


@register_pass("fold-constants")
def fold_constants(graph: Graph, report: Report) -> int:
    """Move each node whose operands are all weights into the weights region.

    It is moved, not evaluated: the compiler materialises the weights that the step still reads.
    """
    return sum(_fold(graph, node) for node in list(graph.nodes))


def _fold(graph: Graph, node: Node) -> bool:
    if not all(value.is_weight for value in node.operands) or not is_pure(node):
        return False
    if _is_symbolic(tuple(node.attrs.values())):
        return False
    names = [value.name for value in node.outputs]
    origin = node.outputs[0].origin
    made = graph.append_weight(node.op, *node.inputs, name=names, origin=origin, **node.attrs)
    graph.replace_all(node.outputs, made.outputs)
    graph.erase(node)
    return True


def _is_symbolic(attr: object) -> bool:
    if isinstance(attr, tuple):
        return any(map(_is_symbolic, attr))
    return isinstance(attr, SymDim)
