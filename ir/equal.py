"""Structural comparison of graphs."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.ir.graph import Graph, Node, Value


def structurally_equal(a: Graph, b: Graph, *, origins: bool = True) -> str | None:
    """None when two graphs are the same text for text, else the first difference in words.

    Names, types, ops, operands, attributes, order and (with ``origins``) origins are compared.
    """
    if a.name != b.name:
        return f"graph names differ: @{a.name} and @{b.name}"
    return (
        _values("parameters", a.inputs, b.inputs, origins)
        or _nodes("weights region", a.weight_nodes, b.weight_nodes, origins)
        or _nodes("step", a.nodes, b.nodes, origins)
        or _names("results", a.outputs, b.outputs)
    )


def _nodes(where: str, a: Sequence[Node], b: Sequence[Node], origins: bool) -> str | None:
    for one, other in zip(a, b, strict=False):
        difference = _node(one, other, origins)
        if difference:
            return f"{where}, {one}: {difference}"
    if len(a) != len(b):
        more = (a if len(a) > len(b) else b)[min(len(a), len(b))]
        return f"{where}: {len(a)} and {len(b)} nodes; only one has {more}"
    return None


def _node(a: Node, b: Node, origins: bool) -> str | None:
    if a.op != b.op:
        return f"ops differ: {a.op} and {b.op}"
    difference = _values("results", a.outputs, b.outputs, origins) or _names(
        "operands", _trimmed(a.inputs), _trimmed(b.inputs)
    )
    if difference:
        return difference
    if list(a.attrs) != list(b.attrs):
        return f"attributes differ: {list(a.attrs)} and {list(b.attrs)}"
    for name, value in a.attrs.items():
        # By repr: 1, 1.0 and True are equal in Python but not here, and nan is not equal to itself.
        if repr(value) != repr(b.attrs[name]):
            return f"attribute {name} differs: {value!r} and {b.attrs[name]!r}"
    return None


def _trimmed(inputs: Sequence[Value | None]) -> list[Value | None]:
    """Operands without the absent ones at the end: they are the same as none given."""
    found = list(inputs)
    while found and found[-1] is None:
        found.pop()
    return found


def _values(what: str, a: Sequence[Value], b: Sequence[Value], origins: bool) -> str | None:
    difference = _names(what, a, b)
    if difference:
        return difference
    for one, other in zip(a, b, strict=True):
        if one.type != other.type:
            return f"types of {one} differ: {one.type} and {other.type}"
        if origins and one.origin != other.origin:
            return f"origins of {one} differ: {one.origin} and {other.origin}"
    return None


def _names(what: str, a: Sequence[Value | None], b: Sequence[Value | None]) -> str | None:
    if list(map(str, a)) == list(map(str, b)):
        return None
    return f"{what} differ: ({', '.join(map(str, a))}) and ({', '.join(map(str, b))})"
