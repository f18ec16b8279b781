"""Logits are computed only for the rows that are sampled: of a prefill chunk the last, if any."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.types import SymDim, TensorType
from octavo.passes.base import Report, register_pass

_R = SymDim("R")
# Ops that map each row on its own, given that all other operands are weights.
_ROW_WISE = ("add", "cast", "div", "linear", "mul", "neg", "softcap", "sub", "tanh")


@register_pass("logit-rows")
def logit_rows(graph: Graph, report: Report) -> int:
    """Gather the wanted rows before the LM head, and return the logits in f32."""
    if any(value.name == "logit_rows" for value in graph.inputs):
        return 0
    logits = graph.outputs[0]
    chain = _head_chain(graph, logits)
    rows = graph.add_input("logit_rows", TensorType("i64", (_R,)))
    _place_before_kv(graph, rows)
    if not chain:
        report.missed(logits, "the rows are gathered last: the logits do not come from a linear")
        flat = _without_batch(graph, None, logits)
        return _finish(graph, graph.append("gather_rows", flat, rows, name=logits.name).output)
    hidden = _row_operand(chain[0])
    assert hidden is not None
    name = f"{hidden.name}.rows"
    flat = _without_batch(graph, chain[0], hidden)
    value = graph.insert_before(chain[0], "gather_rows", flat, rows, name=name).output
    for node in chain:
        old = _row_operand(node)
        inputs = [value if operand is old else operand for operand in node.inputs]
        narrow = graph.insert_before(node, node.op, *inputs, **node.attrs)
        graph.replace_all(node.output, narrow.output)
        value = narrow.output
    return _finish(graph, value)


def _head_chain(graph: Graph, logits: Value) -> list[Node]:
    """The row-wise nodes from the LM head's linear to the logits; empty when there is no such."""
    chain: list[Node] = []
    value: Value | None = logits
    while value is not None:
        node = graph.producer(value, *_ROW_WISE)
        is_private = value is logits or graph.sole_user(value) is not None
        if node is None or not is_private or _row_operand(node) is None:
            return []
        chain.insert(0, node)
        if node.op == "linear":
            return chain
        value = _row_operand(node)
    return []


def _row_operand(node: Node) -> Value | None:
    """The one operand that has rows, when all others are weights without a row dim."""
    rows = [value for value in node.operands if not value.is_weight]
    others = [value for value in node.operands if value.is_weight]
    if len(rows) != 1 or (node.op != "linear" and any(w.tensor.rank > 1 for w in others)):
        return None
    return rows[0]


def _without_batch(graph: Graph, anchor: Node | None, x: Value) -> Value:
    """``[1, T, ...]`` to ``[T, ...]`` where drop-batch left the batch dim on; rows come first."""
    if x.shape[0] != 1:
        return x
    if anchor is None:
        return graph.append("squeeze", x, dim=0, name=x.name, origin=x.origin).output
    return graph.insert_before(anchor, "squeeze", x, dim=0, name=x.name, origin=x.origin).output


def _place_before_kv(graph: Graph, rows: Value) -> None:
    kv = next((value for value in graph.inputs if value.name == "kv"), None)
    if kv is not None:
        graph.inputs.remove(kv)
        graph.inputs.append(kv)


def _finish(graph: Graph, logits: Value) -> int:
    if logits.dtype != "f32":
        name = logits.name
        graph.rename(logits, f"{name}.{logits.dtype}")
        logits = graph.append("cast", logits, dtype="f32", name=name).output
    graph.outputs[0] = logits
    return 1
