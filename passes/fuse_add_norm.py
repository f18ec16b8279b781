"""A residual add and the norm that follows become one op: the sum is read once, not twice."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass


@register_pass("fuse-add-norm")
def fuse_add_norm(graph: Graph, report: Report) -> int:
    """Fuse each residual add into the norm that follows it; the sum lives on as the residual."""
    return sum(_fuse(graph, node, report) for node in graph.find("rms_norm", "layer_norm"))


def _fuse(graph: Graph, norm: Node, report: Report) -> bool:
    add = graph.producer(norm.inputs[0])
    if add is not None and add.op in ("add_rms_norm", "add_layer_norm"):
        return report.missed(norm, "its add is fused with another norm already")
    if add is None or add.op != "add":
        return report.missed(norm, "its input is not an add")
    if add.attrs["scalar"] is not None or add.operand(0).type != add.operand(1).type:
        return report.missed(norm, "a broadcast add is not a residual")
    if any(value.is_weight for value in add.operands):
        return report.missed(norm, "it adds a weight, not a residual")
    fused = graph.insert_before(
        add,
        f"add_{norm.op}",
        *add.inputs,
        *norm.inputs[1:],
        name=[norm.output.name, add.output.name],
        **norm.attrs,
    )
    fused.outputs[0].origin = norm.output.origin
    graph.replace_all([norm.output, add.output], fused.outputs)
    graph.erase(norm)
    graph.erase(add)
    return True
