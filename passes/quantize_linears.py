"""Linears multiply by quantised matrices: those of the checkpoint, and those that a recipe makes.

A matrix that the checkpoint holds quantised enters as its dequantisation; here the linear is given
the codes themselves, those of siblings stacked. All other matrices are rounded by the recipe.
"""

from __future__ import annotations

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops.quant import why_no_concat
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import QuantType
from octavo.passes.base import Missed, Report, register_pass
from octavo.passes.fused_linear import LINEARS
from octavo.passes.quant_recipe import Module, Modules, dequantized_parts

GROUPS = (32, 64, 128)  # of int4, that can be had by name
KEPT = "the checkpoint has it quantised, which a recipe changes only with --dequantize"


@register_pass("quantize-linears")
def quantize_linears(graph: Graph, report: Report) -> int:
    """Give each linear of a constant matrix the quantised one. Raises VerifyError for a K that is
    no multiple of the group."""
    modules = Modules(graph)
    _tell_unmatched(graph, modules, report)
    made: dict[tuple[Value, QuantScheme], Value] = {}  # of matrices that several linears read
    return sum(_quantize(graph, node, modules, made, report) for node in graph.find(*LINEARS))


def _tell_unmatched(graph: Graph, modules: Modules, report: Report) -> None:
    recipe = report.context.quantization.recipe
    if recipe is None or not recipe.is_for_model:
        return
    every = [module for node in graph.find(*LINEARS) for module in modules.of(node)]
    for pattern in recipe.unmatched(every):
        report.misses.append(Missed(pattern, f"no linear answers to this pattern of {recipe.name}"))


def _quantize(
    graph: Graph,
    linear: Node,
    modules: Modules,
    made: dict[tuple[Value, QuantScheme], Value],
    report: Report,
) -> bool:
    weight = linear.operand(1)
    if isinstance(weight.type, QuantType):
        return False
    parts = dequantized_parts(weight)
    recipe = report.context.quantization.recipe
    if parts:
        if recipe is not None and any(recipe.scheme_of(module) for module in modules.of(linear)):
            report.missed(linear, KEPT)
        return _read_codes(graph, linear, parts, report)
    if recipe is None:
        return False
    if not weight.is_weight:
        return report.missed(linear, "it multiplies by an activation")
    members = modules.of(linear)
    schemes = {recipe.scheme_of(module) for module in members}
    if len(schemes) > 1:
        return report.missed(linear, f"{recipe.name} gives its parts different schemes")
    scheme = schemes.pop()
    if scheme is None:
        return report.missed(linear, _why_left(members[0], recipe.name))
    if (weight, scheme) not in made:
        _check_group(members[0], scheme, weight)
        made[weight, scheme] = _rounded(graph, weight, scheme, report)
    _give(graph, linear, made[weight, scheme])
    if members[0].is_head and report.context.quantization.can_embed(scheme):
        _embed(graph, weight, made[weight, scheme])
    return True


def _embed(graph: Graph, weight: Value, matrix: Value) -> None:
    """Look the embedding up in the quantised head where the two are tied: one matrix is kept."""
    readers = [user for user in graph.users(weight) if not user.is_weight]
    if not readers or any(user.op != "embedding" for user in readers):
        return
    for node in readers:
        ids, dtype = node.operand(0), node.output.dtype
        rows = graph.insert_before(node, "quant_embedding", ids, matrix, dtype=dtype)
        graph.replace_all(node.output, rows.output)
        graph.erase(node)


def _read_codes(graph: Graph, linear: Node, parts: list[Value], report: Report) -> bool:
    matrices = [part.type for part in parts]
    reason = why_no_concat(matrices)
    if reason is None:
        scheme = QuantScheme.parse(parts[0].dtype)
        reason = report.context.quantization.why_no_kernel(scheme)
    if reason is not None:
        return report.missed(linear, f"its matrix stays dequantised: {reason}")
    if len(parts) == 1:
        weight = linear.operand(1)
        graph.set_inputs(linear, [linear.inputs[0], parts[0], *linear.inputs[2:]])
        if report.context.quantization.can_embed(scheme):
            _embed(graph, weight, parts[0])
        return True
    name = linear.operand(1).name
    _give(graph, linear, graph.constant("concat_rows", *parts, name=name))
    return True


def _rounded(graph: Graph, weight: Value, scheme: QuantScheme, report: Report) -> Value:
    text, name = str(scheme), weight.name
    if report.context.quantization.is_calibrated:
        shape = tuple(weight.shape)
        return graph.constant("quantized", key=name, scheme=text, shape=shape, name=name)
    return graph.constant("quantize", weight, scheme=text, name=name)


def _give(graph: Graph, linear: Node, matrix: Value) -> None:
    """Make a linear read another matrix, under the old one's name if nothing else reads that."""
    old = linear.operand(1)
    graph.set_inputs(linear, [linear.inputs[0], matrix, *linear.inputs[2:]])
    matrix.origin = matrix.origin.merged(old.origin)
    name = old.name
    if all(user.is_weight for user in graph.users(old)):
        graph.rename(old, f"{name}.{old.dtype}")
        graph.rename(matrix, name)


def _why_left(module: Module, recipe: str) -> str:
    if module.is_head:
        return f"{recipe} leaves the LM head as it is"
    if module.is_special:
        return f"{recipe} leaves routers as they are"
    return f"{recipe} leaves it as it is"


def _check_group(module: Module, scheme: QuantScheme, weight: Value) -> None:
    rows, columns = weight.shape
    try:
        scheme.scale_shape(rows, columns)
    except VerifyError:
        group = scheme.block[1]
        fitting = [str(size) for size in reversed(GROUPS) if columns % size == 0]
        choice = f"a group of {' or '.join(fitting)}" if fitting else "int8, which has no groups"
        raise VerifyError(
            f"{module.paths[0]}: K={columns} is not a multiple of the group of {group} that"
            f" {scheme} has; choose {choice}"
        ) from None
