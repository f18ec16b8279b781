"""Linears of one module that read the same input become one: QKV, gate and up."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops.quant import why_no_concat
from octavo.passes.base import Report, register_pass
from octavo.passes.quant_recipe import Modules, dequantized_parts

# What a merged linear is called, by the first letters of what it merges.
_NAMES = {"qkv": "qkv", "gu": "gate_up"}


@register_pass("merge-linears")
def merge_linears(graph: Graph, report: Report) -> int:
    """Stack the weights of sibling linears, so that one product reads the input once.

    Siblings that are quantised in different ways stay apart.
    """
    groups: dict[tuple[Value, str], list[Node]] = {}
    for node in graph.find("linear"):
        groups.setdefault((node.operand(0), _parent(node)), []).append(node)
    modules = Modules(graph)
    alike = [
        nodes
        for siblings in groups.values()
        if len(siblings) > 1
        for nodes in _of_one_scheme(siblings, modules, report)
    ]
    return sum(_merge(graph, nodes, report) for nodes in alike if len(nodes) > 1)


def _of_one_scheme(siblings: list[Node], modules: Modules, report: Report) -> list[list[Node]]:
    """Siblings in groups that are, or are to be, held by one scheme."""
    groups: dict[str | None, list[Node]] = {}
    for node in siblings:
        groups.setdefault(_scheme_of(node, modules, report), []).append(node)
    if len(groups) > 1:
        told = ", ".join(
            f"{' '.join(_leaf(node) for node in nodes)} {scheme or 'as is'}"
            for scheme, nodes in groups.items()
        )
        report.missed(siblings[0], f"the siblings are quantised differently: {told}")
    return list(groups.values())


def _scheme_of(node: Node, modules: Modules, report: Report) -> str | None:
    held = dequantized_parts(node.operand(1))
    if held:
        return held[0].dtype
    recipe = report.context.quantization.recipe
    scheme = recipe.scheme_of(modules.of(node)[0]) if recipe else None
    return None if scheme is None else str(scheme)


def _parent(node: Node) -> str:
    return node.output.name.rpartition(".")[0]


def _leaf(node: Node) -> str:
    return node.output.name.rpartition(".")[2]


def _merge(graph: Graph, nodes: list[Node], report: Report) -> bool:
    if not all(node.operand(1).is_weight for node in nodes):
        return report.missed(nodes[0], "a sibling multiplies by an activation")
    if len({node.operand(1).dtype for node in nodes}) > 1:
        return report.missed(nodes[0], "the siblings' weights differ in dtype")
    held = [dequantized_parts(node.operand(1)) for node in nodes]
    matrices = [matrix.type for parts in held for matrix in parts]
    reason = why_no_concat(matrices) if matrices else None
    if reason is not None:
        return report.missed(nodes[0], f"the siblings' quantised weights do not stack: {reason}")
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
    leaves = [_leaf(node) for node in nodes]
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
