"""Local rules: each looks at one node and may know a plainer value that equals its result."""

from __future__ import annotations

from collections.abc import Callable

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import infer_types
from octavo.ir.ops.aten import OperandRef
from octavo.passes.traits import PERMUTING, is_elementwise
from octavo.passes.views import shorten, sources

Rule = Callable[[Graph, Node], Value | None]

# Every number of the first is one of the second: going there and back changes nothing.
_LOSSLESS = {
    ("bf16", "f32"),
    ("f16", "f32"),
    ("bf16", "f64"),
    ("f16", "f64"),
    ("f32", "f64"),
    ("i32", "i64"),
}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}


def simplify(graph: Graph, node: Node) -> bool:
    """Apply the first rule that knows better; True when one did."""
    for rule in _rules(node.op):
        value = rule(graph, node)
        if value is not None:
            graph.replace_all(node.outputs[0], value)
            graph.erase(node)
            return True
    return _drop_expands(graph, node)


def _rules(op: str) -> tuple[Rule, ...]:
    if op in _RULES:
        return _RULES[op]
    return (_sink_view,) if op in ("rms_norm", "layer_norm") or is_elementwise(op) else ()


def _operand_of_same_type(graph: Graph, node: Node) -> Value | None:
    """A cast to the same dtype, a slice of everything, an expand to the same shape."""
    x = node.operand(0)
    return x if x.type == node.outputs[0].type else None


def _cast_of_cast(graph: Graph, node: Node) -> Value | None:
    inner = graph.producer(node.operand(0), "cast")
    if inner is None:
        return None
    x = inner.operand(0)
    if (x.dtype, inner.output.dtype) not in _LOSSLESS:
        return None
    return graph.insert_before(node, "cast", x, **node.attrs).output


def _reshape_of_reshape(graph: Graph, node: Node) -> Value | None:
    inner = graph.producer(node.operand(0), "reshape", "unsqueeze", "squeeze")
    if inner is None or not (node.op == "reshape" or inner.op == "reshape"):
        return None
    shape = node.output.shape
    return graph.insert_before(node, "reshape", inner.operand(0), shape=shape).output


def _neutral_scalar(graph: Graph, node: Node) -> Value | None:
    scalar, x = node.attrs["scalar"], node.operand(0)
    if scalar is None or scalar != _NEUTRAL[node.op] or x.type != node.output.type:
        return None
    return x


def _only_operand(graph: Graph, node: Node) -> Value | None:
    return node.operand(0) if len(node.inputs) == 1 and len(node.outputs) == 1 else None


def _slice_of_concat(graph: Graph, node: Node) -> Value | None:
    """A slice that lies within one of the joined values."""
    joined = graph.producer(node.operand(0), "concat")
    if joined is None:
        return None
    rank = node.output.tensor.rank
    dim = node.attrs["dim"] % rank
    size = node.operand(0).shape[dim]
    if joined.attrs["dim"] % rank != dim or not isinstance(size, int):
        return None
    start, end, _ = slice(node.attrs["start"], node.attrs["end"]).indices(size)
    offset = 0
    for part in joined.operands:
        width = part.shape[dim]
        if offset <= start and end <= offset + width:
            attrs = {**node.attrs, "dim": dim, "start": start - offset, "end": end - offset}
            return graph.insert_before(node, "slice", part, **attrs).output
        offset += width
    return None


def _index_by_rows(graph: Graph, node: Node) -> Value | None:
    """Advanced indexing of a matrix by one tensor of row numbers, which are not negative here."""
    if node.attrs["indices"] != (OperandRef(1),) or node.operand(0).tensor.rank != 2:
        return None
    if node.operand(1).dtype not in ("i64", "i32"):
        return None
    return graph.insert_before(node, "embedding", node.operand(1), node.operand(0)).output


def _sink_view(graph: Graph, node: Node) -> Value | None:
    """``f(view(x))`` to ``view(f(x))``, so that the view meets the one that undoes it."""
    x = node.operand(0)
    view = graph.producer(x, *PERMUTING)
    if view is None or graph.sole_user(x) is None:
        return None
    if not _is_along_last_dim(node) or not _meets_view(graph, node):
        return None
    below, places = view.operand(0), sources(view)
    if not places or places[-1] != below.tensor.rank - 1:
        return None
    name, out = node.outputs[0].name, node.outputs[0]
    inner = graph.insert_before(node, node.op, below, *node.inputs[1:], **node.attrs)
    # The view may soon be gone: the name belongs to what is computed.
    graph.rename(out, x.name)
    graph.rename(inner.output, name)
    return graph.insert_before(node, view.op, inner.output, **view.attrs).output


def _is_along_last_dim(node: Node) -> bool:
    """True when all operands but the first are weights for the last dim."""
    if _sink_view not in _rules(node.op):
        return False
    return all(value.is_weight and value.tensor.rank <= 1 for value in node.operands[1:])


def _meets_view(graph: Graph, node: Node) -> bool:
    """True when only ops along the last dim stand between a node and another view."""
    user = graph.sole_user(node.outputs[0])
    if user is None:
        return False
    return user.op in PERMUTING or (_is_along_last_dim(user) and _meets_view(graph, user))


def _drop_expands(graph: Graph, node: Node) -> bool:
    """Read what an expand expands where the op broadcasts anyway."""
    if not node.op.startswith("aten.") and len(node.operands) == 2 and is_elementwise(node.op):
        for index, value in enumerate(node.inputs):
            expand = graph.producer(value, "expand")
            if expand is not None:
                inputs = list(node.inputs)
                inputs[index] = expand.operand(0)
                if _has_type(node, inputs):
                    graph.set_inputs(node, inputs)
                    return True
    return False


def _has_type(node: Node, inputs: list[Value | None]) -> bool:
    operands = [value.type if value is not None else None for value in inputs]
    try:
        return infer_types(node.op, operands, node.attrs) == (node.output.type,)
    except VerifyError:
        return False


_RULES: dict[str, tuple[Rule, ...]] = {
    "cast": (_operand_of_same_type, _cast_of_cast, _sink_view),
    "expand": (_operand_of_same_type,),
    "slice": (_operand_of_same_type, _slice_of_concat),
    "concat": (_only_operand,),
    "split": (_only_operand,),
    "reshape": (_operand_of_same_type, shorten, _reshape_of_reshape),
    "unsqueeze": (shorten, _reshape_of_reshape),
    "squeeze": (shorten, _reshape_of_reshape),
    "transpose": (shorten,),
    "permute": (shorten,),
    "aten.index.Tensor": (_index_by_rows,),
    **{op: (_neutral_scalar, _sink_view) for op in _NEUTRAL},
    **{f"aten.{op}.default": (_only_operand,) for op in ("alias", "clone", "detach")},
}
