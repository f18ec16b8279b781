"""The add of a residual moves into the linear before it: the product is never stored without it.

An add that is fused with a norm goes too, and leaves the norm behind. As many kernels run then,
but the stream is read and written once less; and the norm may go into the linears that follow.
"""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, drop_unread, why_not, with_parts

_NORMS = {"add_rms_norm": "rms_norm", "add_layer_norm": "layer_norm"}


@register_pass("fuse-linear-add")
def fuse_linear_add(graph: Graph, report: Report) -> int:
    """Fuse each sum with the linear that makes one of its operands; of two, with the later."""
    return sum(_fuse(graph, node, report) for node in graph.find("add", *_NORMS))


def _fuse(graph: Graph, add: Node, report: Report) -> bool:
    if add.op == "add" and add.attrs["scalar"] is not None:
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
    _replace(graph, add, linear, residual=y if linear.outputs[0] is x else x)
    return True


def _replace(graph: Graph, add: Node, linear: Node, residual: Value) -> None:
    product, name = linear.outputs[0], linear.outputs[0].name
    fused = with_parts(graph, add, linear, name, residual=residual)
    results = [fused.output]
    if add.op in _NORMS:
        norm = graph.insert_before(add, _NORMS[add.op], fused.output, *add.inputs[2:], **add.attrs)
        results.insert(0, norm.output)
    graph.replace_all(add.outputs, results)
    graph.erase(add)
    drop_unread(graph, [product])
    graph.rename(fused.output, name)
