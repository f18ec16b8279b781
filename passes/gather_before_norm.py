"""Rows are gathered before the last norm, not after it: only those that are sampled are normalised.

Then the norm stands next to the LM head, and may go into it.
"""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass


@register_pass("gather-before-norm")
def gather_before_norm(graph: Graph, report: Report) -> int:
    """Swap each gather of rows with the norm before it."""
    return sum(_swap(graph, node, report) for node in graph.find("gather_rows"))


def _swap(graph: Graph, gather: Node, report: Report) -> bool:
    norm = gather.operand(0).producer
    if norm is None or norm.op not in ("rms_norm", "layer_norm"):
        # Where there is no norm, the rows have been gathered already.
        return False
    if graph.sole_user(norm.output) is not gather:
        return report.missed(gather, "its norm is also read elsewhere")
    x, name = norm.operand(0), norm.output.name
    rows = graph.insert_before(
        gather, "gather_rows", x, gather.operand(1), name=f"{x.name}.rows", origin=x.origin
    )
    swapped = graph.insert_before(
        gather,
        norm.op,
        rows.output,
        *norm.inputs[1:],
        name=name,
        origin=norm.output.origin,
        **norm.attrs,
    )
    graph.replace_all(gather.output, swapped.output)
    graph.erase(gather)
    graph.erase(norm)
    graph.rename(swapped.output, name)
    return True
