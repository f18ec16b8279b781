"""The add of a residual moves into the linear before it: the product is never stored without it.

Even where the norm that follows stays a kernel this is better than to add there: the stream is read
and written once less, and rounded once instead of twice.
"""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, absorb, why_not


@register_pass("fuse-linear-add")
def fuse_linear_add(graph: Graph, report: Report) -> int:
    """Fuse each sum with the linear that makes one of its operands; of two, with the later."""
    return sum(_fuse(graph, node, report) for node in graph.find("add"))


def _fuse(graph: Graph, add: Node, report: Report) -> bool:
    if add.attrs["scalar"] is not None:
        return False
    x, y = add.operand(0), add.operand(1)
    if x.type != y.type:
        return report.missed(add, "a broadcast add is not a residual")
    linears = [node for value in (x, y) if (node := graph.producer(value, *LINEARS))]
    if not linears:
        return report.missed(add, "neither operand comes from a linear")
    reasons = {node: why_not(graph, node, "residual", "out_dtype") for node in linears}
    free = [node for node in linears if reasons[node] is None]
    if x is y or not free:
        return report.missed(add, reasons[linears[-1]] or "both operands are one value")
    linear = max(free, key=graph.nodes.index)
    product = linear.outputs[0]
    absorb(graph, linear, add, name=product.name, residual=y if product is x else x)
    return True
