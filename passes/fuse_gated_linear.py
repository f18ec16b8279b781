"""The gated activation moves into the linear that makes gate and up: half as much is stored."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, absorb, has_part
from octavo.passes.pieces import piece_of


@register_pass("fuse-gated-linear")
def fuse_gated_linear(graph: Graph, report: Report) -> int:
    """Fuse each gated activation of the two halves of one product, the gate first."""
    return sum(_fuse(graph, node, report) for node in graph.find("gated_activation"))


def _fuse(graph: Graph, gated: Node, report: Report) -> bool:
    gate, up = piece_of(gated.operand(0)), piece_of(gated.operand(1))
    linear = graph.producer(gate.base, *LINEARS)
    if linear is None or gate.base is not up.base:
        return report.missed(gated, "gate and up do not come from one linear")
    joined = gate.joined(up)
    if joined is None or not joined.is_whole or gate.count != up.count:
        return report.missed(gated, "gate and up are not the first and the second half")
    if not linear.operand(1).is_weight:
        return report.missed(gated, f"{gate.base} multiplies by an activation")
    if any(has_part(linear, part) for part in ("activation", "cap", "residual", "out_dtype")):
        return report.missed(gated, f"{gate.base} ends in something else already")
    if not _is_only_reader(graph, linear, gated):
        return report.missed(gated, f"a part of {gate.base} is also read elsewhere")
    absorb(graph, linear, gated, name=gate.base.name, activation=gated.attrs["activation"])
    return True


def _is_only_reader(graph: Graph, linear: Node, gated: Node) -> bool:
    """True when all that is read of the product is read, through its cuts, by this node."""
    pending = list(linear.outputs)
    while pending:
        value = pending.pop()
        if value in graph.outputs:
            return False
        for user in graph.users(value):
            if user.op in ("split", "slice"):
                pending.extend(user.outputs)
            elif user is not gated:
                return False
    return True
