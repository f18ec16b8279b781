"""The softcap of a product and its cast to f32 move into the linear: logits are stored once."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, absorb, why_not


@register_pass("fuse-linear-cast")
def fuse_linear_cast(graph: Graph, report: Report) -> int:
    """Fuse softcaps, then casts to f32, with the linears before them."""
    count = sum(_fuse_cap(graph, node, report) for node in graph.find("softcap"))
    return count + sum(_fuse_cast(graph, node, report) for node in graph.find("cast"))


def _fuse_cap(graph: Graph, softcap: Node, report: Report) -> bool:
    linear = graph.producer(softcap.operand(0), *LINEARS)
    if linear is None:
        return report.missed(softcap, "its input does not come from a linear")
    reason = why_not(graph, linear, "cap", "residual", "out_dtype")
    if reason is not None:
        return report.missed(softcap, reason)
    absorb(graph, linear, softcap, name=softcap.output.name, cap=softcap.attrs["cap"])
    return True


def _fuse_cast(graph: Graph, cast: Node, report: Report) -> bool:
    x = cast.operand(0)
    if cast.output.dtype != "f32" or x.dtype not in ("bf16", "f16"):
        return False
    linear = graph.producer(x, *LINEARS)
    if linear is None:
        is_result = cast.output in graph.outputs
        return is_result and report.missed(cast, "its input does not come from a linear")
    # A residual has the dtype of the result.
    reason = why_not(graph, linear, "residual", "out_dtype")
    if reason is not None:
        return report.missed(cast, reason)
    absorb(graph, linear, cast, name=cast.output.name, out_dtype="f32")
    return True
