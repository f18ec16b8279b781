"""fuse-pointwise: element-wise ops that nothing else took become few kernels.

A group grows from its result upwards: it takes in what makes an operand, as long as nobody outside
reads that. All its values are spread over rows of one shape, so that a kernel holds them in
registers: each operand is read once, only the result is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import op_def
from octavo.ir.ops.aten import OperandRef, _overload
from octavo.ir.ops.pointwise import REDUCTIONS, has_kernel, tile_shape, why_not
from octavo.ir.pointwise_expr import Call, Expression
from octavo.ir.types import TensorType
from octavo.passes.base import Report, register_pass

MAX_OPERANDS = 12  # of a group: each wants registers for its part of the tile
_OWN_KERNEL = frozenset(("gated_activation", "softcap"))


@register_pass("fuse-pointwise")
def fuse_pointwise(graph: Graph, report: Report) -> int:
    """Fuse maximal groups of element-wise ops, from the last to the first."""
    candidates = {node for node in graph.nodes if _is_candidate(node, report)}
    free = set(candidates)
    groups: list[list[Node]] = []
    for root in reversed(graph.nodes):
        if root in free:
            members = _grown(graph, root, free)
            free -= members
            groups.append([node for node in graph.nodes if node in members])
    for group in reversed(groups):
        _report_outside(graph, group, candidates, report)
    fused = [group for group in groups if len(group) > 1 or group[0].op not in _OWN_KERNEL]
    for group in fused:
        _fuse(graph, group)
    return len(fused)


def _is_candidate(node: Node, report: Report) -> bool:
    """Whether a kernel can run this node; element-wise ones that none can are reported."""
    if not has_kernel(node.op):
        is_missed = node.op.startswith("aten.") and torch.Tag.pointwise in _overload(node.op).tags
        return is_missed and report.missed(node, f"there is no kernel for {node.op}")
    if not _has_plain_operands(node):
        return report.missed(node, "its operands are not just tensors in order")
    types = [value.tensor for value in (*node.operands, node.output)]
    reason = why_not(node.op, types, node.attrs) or _misfit([node])
    return reason is None or report.missed(node, reason)


def _has_plain_operands(node: Node) -> bool:
    is_plain = all(isinstance(value.type, TensorType) for value in node.operands)
    is_gapless = node.inputs[: len(node.operands)] == node.operands
    return is_plain and is_gapless and not any(map(_has_reference, node.attrs.values()))


def _has_reference(attr: Any) -> bool:
    if isinstance(attr, tuple):
        return any(map(_has_reference, attr))
    return isinstance(attr, OperandRef)


def _misfit(group: Iterable[Node]) -> str | None:
    """Why one tile cannot hold the values of a group, or None."""
    nodes = list(group)
    values = [value for node in nodes for value in (*node.operands, node.output)]
    try:
        tile = tile_shape([value.tensor for value in values])
    except VerifyError as error:
        return str(error)
    if any(node.op in REDUCTIONS and node.operand(0).shape[-1] != tile[-1] for node in nodes):
        return "it reduces rows of another width"
    if len({value for value in values if value.producer not in nodes}) > MAX_OPERANDS:
        return f"the group would have more than {MAX_OPERANDS} operands"
    return None


def _grown(graph: Graph, root: Node, free: set[Node]) -> set[Node]:
    """The largest group that gives the result of ``root``."""
    group = {root}
    while True:
        for maker in _makers(group):
            if maker in free and not _why_outside(graph, maker, group):
                # What several nodes read may now be read by the group alone: look again.
                group.add(maker)
                break
        else:
            return group


def _makers(group: Iterable[Node]) -> Iterator[Node]:
    """The nodes of the step outside of a group that make its operands."""
    for node in group:
        for value in node.operands:
            if value.producer and value.producer not in group and not value.is_weight:
                yield value.producer


def _why_outside(graph: Graph, maker: Node, group: Iterable[Node]) -> str | None:
    """Why a candidate that makes an operand stays outside of a group, or None."""
    is_read = maker.output in graph.outputs
    if is_read or not all(user in group for user in graph.users(maker.output)):
        return "it is read outside of the group as well"
    return _misfit([*group, maker])


def _report_outside(graph: Graph, group: list[Node], candidates: set[Node], report: Report) -> None:
    for maker in dict.fromkeys(_makers(group)):
        if maker in candidates and (reason := _why_outside(graph, maker, group)):
            report.missed(maker, reason)


def _fuse(graph: Graph, group: list[Node]) -> None:
    """Replace a group, in order with the result's node last, by one ``pointwise``."""
    root = group[-1]
    operands, expression = _expression(group)
    origins = [node.output.origin for node in reversed(group)]
    fused = graph.insert_before(
        root,
        "pointwise",
        *operands,
        expr=str(expression),
        origin=origins[0].merged(*origins[1:]),
    )
    graph.replace_all(root.output, fused.output)
    for node in reversed(group):
        graph.erase(node)


def _expression(group: list[Node]) -> tuple[list[Value], Expression]:
    """The operands of a group, and its expression over them."""
    reads = Counter(value for node in group for value in node.operands)
    operands: dict[Value, str] = {}
    inside: dict[Value, Call | str] = {}
    named: list[tuple[str, Call]] = []
    for node in group:
        arguments = tuple(
            inside[value] if value in inside else operands.setdefault(value, f"a{len(operands)}")
            for value in node.operands
        )
        call = Call(node.op, arguments, _attributes(node))
        inside[node.output] = call
        if reads[node.output] > 1:
            inside[node.output] = f"t{len(named)}"
            named.append((f"t{len(named)}", call))
    result = inside[group[-1].output]
    assert isinstance(result, Call), "nothing in a group reads its result"
    return list(operands), Expression(tuple(named), result)


def _attributes(node: Node) -> tuple[tuple[str, Any], ...]:
    """Those that are not at their default."""
    parameters = op_def(node.op).attributes
    return tuple(
        (name, value)
        for name, value in node.attrs.items()
        if name not in parameters or value != parameters[name].default
    )
