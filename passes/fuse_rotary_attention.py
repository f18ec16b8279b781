"""Attention takes in what prepares it: the norm of the heads, the rotation and the KV write."""

from __future__ import annotations

from typing import Any

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass


@register_pass("fuse-rotary-attention")
def fuse_rotary_attention(graph: Graph, report: Report) -> int:
    """Fuse each ``paged_attention`` with the ``rotary_kv_write`` that it reads."""
    return sum(_fuse(graph, node, report) for node in graph.find("paged_attention"))


def _fuse(graph: Graph, attention: Node, report: Report) -> bool:
    q, kv = attention.operand(0), attention.operand(1)
    write = graph.producer(q, "rotary_kv_write")
    if write is None or write.outputs != [q, kv]:
        return report.missed(attention, "its q is not rotated together with the write of its k")
    if graph.sole_user(q) is not attention:
        return report.missed(attention, "its rotated q is also read elsewhere")
    if write.attrs["slot"] != attention.attrs["slot"]:
        return report.missed(attention, "it reads another slot than is written before it")
    # The write stays where it is among the writes and reads of the cache; the rest moves there.
    if any(_is_made_after(graph, value, write) for value in attention.operands[2:]):
        return report.missed(attention, "its block table is made after the write")
    heads, norm = _head_norms(graph, write, report)
    fused = graph.insert_before(
        write,
        "rotary_paged_attention",
        write.operand(0),
        *heads,
        *write.inputs[3:7],
        *_with_norms(attention.inputs[2:], norm, write.inputs[7:]),
        name=[attention.output.name, kv.name],
        origin=attention.output.origin,
        **{**write.attrs, **attention.attrs, **norm.attrs},
    )
    _replace(graph, write, attention, fused)
    return True


def _is_made_after(graph: Graph, value: Value, node: Node) -> bool:
    made = None if value.is_weight else graph.producer(value)
    return made is not None and graph.nodes.index(made) > graph.nodes.index(node)


class _Norm:
    """The norm of the heads: its weights and attributes; without one, none of either."""

    def __init__(self, weights: list[Value | None], **attrs: Any) -> None:
        self.weights = weights
        self.attrs = attrs


def _with_norms(
    inputs: list[Value | None], norm: _Norm, scales: list[Value | None]
) -> list[Value | None]:
    sinks = inputs[3] if len(inputs) > 3 else None
    operands = [*inputs[:3], sinks, *(norm.weights or (None, None)), *scales]
    while operands[-1] is None:
        operands.pop()
    return operands


def _replace(graph: Graph, write: Node, attention: Node, fused: Node) -> None:
    made = [node for value in write.operands[1:3] if (node := graph.producer(value))]
    out, kv = fused.outputs
    out.origin = out.origin.merged(write.outputs[0].origin)
    graph.replace_all([attention.output, write.outputs[1]], [out, kv])
    graph.erase(attention)
    graph.erase(write)
    for node in made:
        if node.op == "rms_norm" and not graph.users(node.output):
            out.origin = out.origin.merged(node.output.origin)
            graph.erase(node)


def _head_norms(graph: Graph, write: Node, report: Report) -> tuple[list[Value], _Norm]:
    """q and k as they are before the norm of their heads, and that norm; else as they are."""
    q, k = write.operand(1), write.operand(2)
    norms = [node for value in (q, k) if (node := graph.producer(value, "rms_norm", "layer_norm"))]
    if not norms:
        return [q, k], _Norm([])
    reason = _why_apart(graph, norms)
    if reason is not None:
        report.missed(norms[0], reason)
        return [q, k], _Norm([])
    of_q, of_k = norms
    weights = [node.inputs[1] if len(node.inputs) > 1 else None for node in norms]
    attrs = {"norm_eps": of_q.attrs["eps"], "norm_offset": of_q.attrs["weight_offset"]}
    return [of_q.operand(0), of_k.operand(0)], _Norm(weights, **attrs)


def _why_apart(graph: Graph, norms: list[Node]) -> str | None:
    if len(norms) == 1:
        return "just one of q and k is normalised"
    if any(node.op != "rms_norm" for node in norms):
        return "a layer norm of the heads is no part of attention"
    if norms[0].attrs != norms[1].attrs:
        return "the heads of q and k are normalised in different ways"
    if any(graph.sole_user(node.output) is None for node in norms):
        return "the normalised heads are also read elsewhere"
    weights = [weight for node in norms for weight in node.operands[1:]]
    if any(weight.tensor.rank != 1 or not weight.is_weight for weight in weights):
        return "each head has a weight of its own"
    return None
