"""The weight of an RMS norm moves into the linears that read it: (x * w) @ W.T = x @ (W * w).T.

The fold is part of the weights region: it costs nothing in the step. What is left of the norm is a
factor for each row, which a linear can apply after its product.
"""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.fused_linear import LINEARS, has_part
from octavo.passes.quant_recipe import dequantized_parts


@register_pass("fold-norm-weight")
def fold_norm_weight(graph: Graph, report: Report) -> int:
    """Fold each weight that only linears see, where no other node of the step reads theirs."""
    return sum(_fold(graph, node, report) for node in graph.find("rms_norm"))


def _fold(graph: Graph, norm: Node, report: Report) -> bool:
    weight = norm.inputs[1] if len(norm.inputs) > 1 else None
    if weight is None:
        return False
    reason = _why_not(graph, norm, weight)
    if reason is not None:
        return report.missed(norm, reason)
    scale = _scale(graph, weight, norm.attrs["weight_offset"])
    for linear in graph.users(norm.output):
        inputs = list(linear.inputs)
        inputs[1] = _scaled(graph, linear.operand(1), scale)
        graph.set_inputs(linear, inputs)
    # With no weight to come there is no rounding before it.
    bare = graph.insert_before(norm, "rms_norm", norm.operand(0), eps=norm.attrs["eps"])
    graph.replace_all(norm.output, bare.output)
    graph.erase(norm)
    return True


def _why_not(graph: Graph, norm: Node, weight: Value) -> str | None:
    readers = graph.users(norm.output)
    if not weight.is_weight or weight.tensor.rank != 1:
        return f"its weight {weight} is not one number for each column"
    if norm.output in graph.outputs or not readers:
        return "it is a result of the graph"
    for node in readers:
        is_factor = node.op in LINEARS and node.operand(0) is norm.output
        if not is_factor or has_part(node, "norm_eps"):
            return f"it is read by {node.outputs[0]} ({node.op})"
        if norm.output in node.inputs[1:] or not node.operand(1).is_weight:
            return f"{node.outputs[0]} multiplies by an activation"
        if dequantized_parts(node.operand(1)):
            return f"{node.operand(1)} is quantised as it is"
        others = [user for user in graph.users(node.operand(1)) if user is not node]
        in_step = next((user for user in others if not user.is_weight), None)
        if in_step is not None:
            reader = in_step.outputs[0]
            return f"{node.operand(1)} is also read by {reader}: it would be stored twice"
    return None


def _scale(graph: Graph, weight: Value, offset: float) -> Value:
    scale = _cast(graph, weight, _wide(weight), f"{weight.name}.f32")
    if not offset:
        return scale
    return graph.constant("add", scale, scalar=offset, name=f"{weight.name}.offset")


def _scaled(graph: Graph, weight: Value, scale: Value) -> Value:
    wide = _cast(graph, weight, scale.dtype, f"{weight.name}.f32")
    is_wide = wide is weight
    name = f"{weight.name}.folded"
    product = graph.constant("mul", wide, scale, name=name if is_wide else f"{weight.name}.scaled")
    return _cast(graph, product, weight.dtype, name)


def _cast(graph: Graph, value: Value, dtype: str, name: str) -> Value:
    if value.dtype == dtype:
        return value
    return graph.constant("cast", value, dtype=dtype, name=name)


def _wide(value: Value) -> str:
    return "f64" if value.dtype == "f64" else "f32"
