"""An RMS norm without a weight moves into the linears that read it: no kernel runs for it.

The norm of a row is one factor, which commutes with the product: y = (x @ W.T) * rsqrt(...).
"""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, has_part, with_parts


@register_pass("fuse-norm-linear")
def fuse_norm_linear(graph: Graph, report: Report) -> int:
    """Fuse each norm that only linears read. Runs after fold-norm-weight."""
    for node in graph.find("layer_norm"):
        report.missed(node, "a layer norm subtracts a mean, which no linear does")
    return sum(_fuse(graph, node, report) for node in graph.find("rms_norm"))


def _fuse(graph: Graph, norm: Node, report: Report) -> bool:
    if len(norm.operands) > 1:
        return report.missed(norm, "it has a weight that was not folded")
    linears = graph.users(norm.output)
    if norm.output in graph.outputs or not linears:
        return report.missed(norm, "it is a result of the graph")
    for node in linears:
        if node.op not in LINEARS or has_part(node, "norm_eps"):
            return report.missed(norm, f"it is read by {node.outputs[0]} ({node.op})")
        if norm.output in node.inputs[1:] or not node.operand(1).is_weight:
            return report.missed(norm, f"{node.outputs[0]} reads it as more than x")
    for linear in linears:
        _replace(graph, norm, linear)
    graph.erase(norm)
    return True


def _replace(graph: Graph, norm: Node, linear: Node) -> None:
    name = linear.outputs[0].name
    attrs = {"x": norm.operand(0), "norm_eps": norm.attrs["eps"]}
    fused = with_parts(graph, linear, linear, name, **attrs)
    for old, new in zip(linear.outputs, fused.outputs, strict=True):
        new.origin = old.origin.merged(norm.output.origin)
    graph.replace_all(linear.outputs, fused.outputs)
    graph.erase(linear)
