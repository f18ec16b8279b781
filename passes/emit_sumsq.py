"""Who writes a residual stream also adds up its squares, so that the next norm need not read it."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops.fused import SUMSQ_COLUMNS
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, has_part, with_parts

_NORMS = ("rms_norm", "layer_norm")


@register_pass("emit-sumsq")
def emit_sumsq(graph: Graph, report: Report) -> int:
    """Give each ``fused_linear`` with a norm the sums of squares of the stream that it reads."""
    streams: dict[Value, list[Node]] = {}
    for node in graph.find("fused_linear"):
        if has_part(node, "norm_eps") and not has_part(node, "sumsq"):
            streams.setdefault(node.operand(0), []).append(node)
    return sum(_emit(graph, x, takers, report) for x, takers in streams.items())


def _emit(graph: Graph, x: Value, takers: list[Node], report: Report) -> bool:
    producer = x.producer
    if producer is None or producer.op not in (*LINEARS, "embedding"):
        maker = "is an input" if producer is None else f"is made by a {producer.op}"
        return report.missed(takers[0], f"{x} {maker}, which sums no squares")
    if not isinstance(x.shape[-1], int) or x.shape[-1] % SUMSQ_COLUMNS or x.tensor.rank != 2:
        return report.missed(takers[0], f"{x} is not rows of a multiple of {SUMSQ_COLUMNS}")
    if producer.op in LINEARS and not producer.operand(1).is_weight:
        return report.missed(takers[0], f"{x} is multiplied by an activation")
    others = [node for node in graph.users(x) if node.op in _NORMS and node.operand(0) is x]
    if others:
        return report.missed(takers[0], f"{x} is read for {others[0].outputs[0]} anyway")
    total, sumsq = _emitting(graph, producer).outputs
    graph.replace_all(x, total)
    graph.erase(producer)
    for taker in takers:
        fused = with_parts(graph, taker, taker, taker.outputs[0].name, sumsq=sumsq)
        graph.replace_all(taker.outputs, fused.outputs)
        graph.erase(taker)
    return True


def _emitting(graph: Graph, producer: Node) -> Node:
    """The node that makes the stream once more, with its sums of squares."""
    x = producer.outputs[0]
    if producer.op == "embedding":
        names = [x.name, f"{x.name}.sumsq"]
        return graph.insert_before(producer, "embedding_sumsq", *producer.inputs, name=names)
    return with_parts(graph, producer, producer, x.name, emit_sumsq=True)
