"""Housekeeping: what says nothing goes, what is said twice is said once."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.simplify import simplify
from octavo.passes.traits import is_pure


@register_pass("clean")
def clean(graph: Graph, report: Report) -> int:
    """Simplify, merge equal values and drop dead ones, until nothing changes."""
    total = 0
    while True:
        count = graph.sweep() + merge_equal(graph)
        # A rule may make a node that another rule reads, hence the snapshot and the outer loop.
        for node in list(graph.all_nodes()):
            count += simplify(graph, node)
        if not count:
            return total
        total += count


def merge_equal(graph: Graph) -> int:
    """Keep the first of nodes of a region with equal op, operands and attributes."""
    seen: dict[tuple[object, ...], Node] = {}
    count = 0
    for node in list(graph.all_nodes()):
        if not is_pure(node):
            continue
        # repr, since 1, 1.0 and True are one key of a dict but not one attribute.
        key = (node.is_weight, node.op, *map(_key, node.inputs), repr(node.attrs))
        first = seen.setdefault(key, node)
        if first is not node:
            graph.replace_all(node.outputs, first.outputs)
            graph.erase(node)
            count += 1
    return count


def _key(value: Value | None) -> int:
    return id(value)
