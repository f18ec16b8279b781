"""raise-softcap: ``cap * tanh(x / cap)`` becomes ``softcap``."""

from __future__ import annotations

import math

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass


@register_pass("raise-softcap")
def raise_softcap(graph: Graph, report: Report) -> int:
    """Raise each tanh that squashes to a cap. Runs after raise-activation, which takes GELU's."""
    return sum(_raise(graph, node, report) for node in graph.find("tanh"))


def _raise(graph: Graph, tanh: Node, report: Report) -> bool:
    inner = graph.producer(tanh.operand(0), "div", "mul")
    scale = inner.attrs["scalar"] if inner is not None else None
    if inner is None or not scale:
        return report.missed(tanh, "its input is not divided by a cap")
    cap = scale if inner.op == "div" else 1 / scale
    outer = graph.sole_user(tanh.output)
    if outer is None or outer.op != "mul" or outer.attrs["scalar"] is None:
        return report.missed(tanh, "its result is not multiplied by a cap")
    factor = float(outer.attrs["scalar"])
    # A reciprocal loses a bit on the way: equal up to the rounding of f64.
    if not math.isclose(factor, cap, rel_tol=1e-12):
        return report.missed(tanh, f"divided by {cap:g} but multiplied by {factor:g}")
    capped = graph.insert_before(outer, "softcap", inner.operand(0), cap=factor)
    graph.replace_all(outer.output, capped.output)
    return True
