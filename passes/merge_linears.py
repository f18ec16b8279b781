"""Linears of one module that read the same input become one: QKV, gate and up."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass

# What a merged linear is called, by the first letters of what it merges.
_NAMES = {"qkv": "qkv", "gu": "gate_up"}


@register_pass("merge-linears")
def merge_linears(graph: Graph, report: Report) -> int:
    """Stack the weights of sibling linears, so that one product reads the input once."""
    groups: dict[tuple[Value, str], list[Node]] = {}
    for node in graph.find("linear"):
        groups.setdefault((node.operand(0), _parent(node)), []).append(node)
    return sum(_merge(graph, nodes, report) for nodes in groups.values() if len(nodes) > 1)


def _parent(node: Node) -> str:
    return node.output.name.rpartition(".")[0]


def _merge(graph: Graph, nodes: list[Node], report: Report) -> bool:
    if not all(node.operand(1).is_weight for node in nodes):
        return report.missed(nodes[0], "a sibling multiplies by an activation")
    if len({node.operand(1).dtype for node in nodes}) > 1:
        return report.missed(nodes[0], "the siblings' weights differ in dtype")
    first, name = nodes[0], _merged_name(nodes)
    weight = graph.constant("concat", *(n.operand(1) for n in nodes), dim=0, name=f"{name}.weight")
    bias = _merged_bias(graph, nodes, name)
    merged = graph.insert_before(first, "linear", first.operand(0), weight, bias, name=name)
    sizes = tuple(node.operand(1).shape[0] for node in nodes)
    names = [node.output.name for node in nodes]
    parts = graph.insert_before(first, "split", merged.output, sizes=sizes, dim=-1, name=names)
    merged.output.origin = merged.output.origin.merged(*(node.output.origin for node in nodes))
    graph.replace_all([node.output for node in nodes], parts.outputs)
    for node in nodes:
        graph.erase(node)
    return True


def _merged_name(nodes: list[Node]) -> str:
    leaves = [node.output.name.rpartition(".")[2] for node in nodes]
    initials = "".join(leaf[0] for leaf in leaves)
    leaf = _NAMES.get(initials, "_".join(leaves))
    return f"{_parent(nodes[0])}.{leaf}".lstrip(".")


def _merged_bias(graph: Graph, nodes: list[Node], name: str) -> Value | None:
    """The stacked biases, zeros where a sibling has none; None when none has one."""
    biases = [node.inputs[2] if len(node.inputs) > 2 else None for node in nodes]
    if not any(biases):
        return None
    filled = [
        bias
        if bias is not None
        else graph.constant(
            "fill", value=0.0, type=node.operand(1).tensor.with_shape(node.operand(1).shape[0])
        )
        for bias, node in zip(biases, nodes, strict=True)
    ]
    return graph.constant("concat", *filled, dim=0, name=f"{name}.bias")
