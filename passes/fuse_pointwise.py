"""fuse-pointwise: element-wise ops that nothing else took become few kernels.

A group grows from its result upwards: it takes in what makes an operand, as long as nobody outside
reads that. All its values are spread over rows of one shape, so that a kernel holds them in
registers: each operand is read once, only the result is written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Attr, Graph, Node, Value
from octavo.ir.ops.aten import OperandRef, _overload
from octavo.ir.ops.elementwise import broadcast
from octavo.ir.ops.pointwise import ELEMENTWISE, REDUCTIONS, tile_shape, why_not
from octavo.ir.types import TensorType
from octavo.passes.base import Report, register_pass

_CANDIDATES = ELEMENTWISE | REDUCTIONS
_HAVE_KERNELS = frozenset(("gated_activation", "softcap"))
MAX_OPERANDS = 12  # of a group: each wants registers for its part of the tile


@register_pass("fuse-pointwise")
def fuse_pointwise(graph: Graph, report: Report) -> int:
    """Fuse maximal groups of element-wise ops, the last one's first."""
    count = 0
    taken: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in taken or not _is_candidate(node, report):
            continue
        group = _grown(graph, node, report)
        taken.update(group)
        if len(group) == 1 and node.op in _HAVE_KERNELS:
            continue
        if _fuse(graph, [each for each in graph.nodes if each in group], report):
            count += 1
    return count


def _is_candidate(node: Node, report: Report) -> bool:
    """Whether a kernel can run this node by itself; other element-wise ones are reported."""
    if node.op not in _CANDIDATES:
        is_elementwise = node.op.startswith("aten.") and torch.Tag.pointwise in _tags(node)
        return is_elementwise and report.missed(node, f"{node.op} has no element-wise kernel")
    if len(node.outputs) != 1 or len(node.operands) != len(_given(node)):
        return report.missed(node, "its operands are not all tensors that stand in order")
    values = [*node.operands, node.output]
    if not all(isinstance(value.type, TensorType) for value in values):
        return report.missed(node, "it reads or makes something else than tensors")
    reason = why_not(node.op, [value.tensor for value in values], node.attrs)
    if reason is not None:
        return report.missed(node, reason)
    try:
        _tile([node])
    except VerifyError as error:
        return report.missed(node, str(error))
    return True


def _tags(node: Node) -> list[torch.Tag]:
    return _overload(node.op).tags


def _given(node: Node) -> list[Value | None]:
    """The operands that stand before the first absent one; none where an attribute refers to one."""
    if any(isinstance(item, OperandRef) for item in _flat(node.attrs.values())):
        return []
    inputs = list(node.inputs)
    return inputs[: inputs.index(None)] if None in inputs else inputs


def _flat(values: Iterable[Attr]) -> Iterable[Attr]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _tile(group: Iterable[Node]) -> tuple[object, ...]:
    """The rows that a group is spread over. Raises VerifyError for shapes that do not fit."""
    nodes = list(group)
    types = [value.tensor for node in nodes for value in (*node.operands, node.output)]
    tile = tile_shape(types)
    for node in nodes:
        if node.op in REDUCTIONS and node.operand(0).shape[-1] != tile[-1]:
            raise VerifyError("a sum over other rows")
    return tile


def _grown(graph: Graph, root: Node, report: Report) -> set[Node]:
    """The largest group whose result is that of ``root``."""
    group = {root}
    shape = broadcast([root.output.shape, *_reduced(root)])
    pending = [root]
    while pending:
        for value in pending.pop().operands:
            maker = value.producer
            if maker is None or maker in group or maker.is_weight or maker.op not in _CANDIDATES:
                continue
            reason = _why_outside(graph, maker, group, shape, report)
            if reason is None:
                group.add(maker)
                # What was read by a node outside may now be read by the group alone.
                pending = list(group)
            elif reason:
                report.missed(maker, reason)
    return group


def _reduced(root: Node) -> list[tuple[object, ...]]:
    return [root.operand(0).shape] if root.op in REDUCTIONS else []
