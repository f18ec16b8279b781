"""How passes put more around a linear: the one way to make a ``fused_linear`` out of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.ir.graph import Graph, Node, Value

LINEARS = ("linear", "fused_linear")
_OPERANDS = ("x", "weight", "bias", "residual", "sumsq")


def has_part(linear: Node, part: str) -> bool:
    """True when a linear has this optional operand, or this attribute set."""
    if part in _OPERANDS:
        index = _OPERANDS.index(part)
        return index < len(linear.inputs) and linear.inputs[index] is not None
    return bool(linear.attrs.get(part))


def why_not(graph: Graph, linear: Node, *parts: str) -> str | None:
    """Why nothing more can be done to a linear's result before it is stored; None when it can.

    ``parts`` are those that what is to be added cannot follow.
    """
    if not linear.operand(1).is_weight:
        return f"{linear.outputs[0]} multiplies by an activation"
    if has_part(linear, "emit_sumsq") or graph.sole_user(linear.outputs[0]) is None:
        return f"{linear.outputs[0]} is also read elsewhere"
    taken = next((part for part in parts if has_part(linear, part)), None)
    return f"{linear.outputs[0]} has a {taken} already" if taken else None


def with_parts(graph: Graph, anchor: Node, linear: Node, name: str, **parts: Any) -> Node:
    """A ``fused_linear`` before ``anchor``: the linear, and operands and attributes by their names.

    Its results are called ``name`` and, with ``emit_sumsq``, ``name.sumsq``; they come from where
    the linear's came from.
    """
    given = dict(zip(_OPERANDS, linear.inputs, strict=False))
    operands = [parts.pop(key, given.get(key)) for key in _OPERANDS]
    while operands[-1] is None:
        operands.pop()
    attrs = {**linear.attrs, **parts}
    names = [name, f"{name}.sumsq"] if attrs.get("emit_sumsq") else name
    origin = linear.outputs[0].origin
    return graph.insert_before(
        anchor, "fused_linear", *operands, name=names, origin=origin, **attrs
    )


def absorb(graph: Graph, linear: Node, after: Node, *, name: str, **parts: Any) -> None:
    """Replace a linear and the node after it, which alone reads its result, by a fused one."""
    read = list(after.operands)
    fused = with_parts(graph, after, linear, name, **parts)
    graph.replace_all(after.output, fused.output)
    graph.erase(after)
    drop_unread(graph, read)
    graph.rename(fused.output, name)


def drop_unread(graph: Graph, values: Sequence[Value]) -> None:
    """Erase what makes values that nobody reads any more, and what was read for them alone."""
    for value in values:
        node = value.producer
        if node is None or node.is_weight or node not in graph.nodes:
            continue
        if not any(graph.users(result) or result in graph.outputs for result in node.outputs):
            graph.erase(node)
            drop_unread(graph, node.operands)
