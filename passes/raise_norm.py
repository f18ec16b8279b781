"""raise-norm: RMSNorm and LayerNorm spelled out in element-wise ops become one op.

The attributes of ``rms_norm`` say exactly where the trace rounds and what it adds to the weight, so
that the raised graph computes what the model computes, in every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.match import Attr, Bind, OneOf, Op, Pattern, match
from octavo.passes.widening import before_widening

_X, _EPS, _DIM = Bind("x"), Attr("eps"), Attr("dim")


def _mean(x: Pattern) -> Pattern:
    return Op("aten.mean.dim", x, dim=_DIM, keepdim=True)


def _normalised(x: Pattern) -> Pattern:
    """``x / sqrt(mean(x**2) + eps)`` in its spellings."""
    square = OneOf(Op("pow", x, scalar=2), Op("mul", x, x), Op("aten.square.default", x))
    shifted = Op("add", _mean(square), scalar=_EPS)
    inverse = OneOf(Op("rsqrt", shifted), Op("pow", shifted, scalar=-0.5))
    return OneOf(Op("mul", x, inverse), Op("div", x, Op("sqrt", shifted)))


_RMS = _normalised(_X)
_LAYER = _normalised(Op("sub", _X, _mean(_X)))

_WIDE = ("f32", "f64")

_WHOLE = ("aten.layer_norm.default", "aten.native_layer_norm.default", "aten.rms_norm.default")


@register_pass("raise-norm")
def raise_norm(graph: Graph, report: Report) -> int:
    """Raise each norm, whether PyTorch's own or spelled out."""
    count = sum(_raise_whole(graph, node, report) for node in graph.find(*_WHOLE))
    count += sum(_raise_spelled(graph, node) for node in graph.find("mul", "div"))
    count += sum(_take_casts(graph, node) for node in graph.find("rms_norm", "layer_norm"))
    graph.sweep()
    for node in graph.find("rsqrt"):
        is_wide = node.output.dtype in _WIDE
        form = "no x * rsqrt(mean(x**2) + eps) over the last dim is made of it"
        report.missed(node, form if is_wide else f"it is taken in {node.output.dtype}, not in f32")
    return count


# PyTorch's own norms


def _raise_whole(graph: Graph, node: Node, report: Report) -> bool:
    """They reduce in f32, apply weight and bias there, and round once, as ours do."""
    eps = node.attrs.get("eps")
    if len(node.attrs["normalized_shape"]) != 1:
        return report.missed(node, "it normalises more than the last dim")
    if any(graph.users(value) or value in graph.outputs for value in node.outputs[1:]):
        return report.missed(node, "its mean or its scale is also read")
    if eps is None:
        return report.missed(node, "no eps: PyTorch takes one from the dtype")
    kind = "rms_norm" if "rms" in node.op else "layer_norm"
    norm = graph.insert_before(node, kind, *node.inputs, eps=eps, name=node.outputs[0].name)
    graph.replace_all(node.outputs[0], norm.output)
    return True


def _take_casts(graph: Graph, norm: Node) -> bool:
    """Drop a cast to f32 before a norm and the one back: it reduces in f32 anyway (OLMo)."""
    x, back = before_widening(norm.operand(0)), graph.sole_user(norm.output)
    if x is norm.operand(0) or back is None or back.op != "cast" or back.output.dtype != x.dtype:
        return False
    # What was wide was not rounded before the weight was applied, whatever the attribute says.
    attrs = {**norm.attrs, **({"round_first": False} if norm.op == "rms_norm" else {})}
    params = [value and before_widening(value) for value in norm.inputs[1:]]
    narrow = graph.insert_before(back, norm.op, x, *params, **attrs)
    graph.replace_all(back.output, narrow.output)
    return True


# Norms spelled out


@dataclass(frozen=True)
class _Norm:
    """A norm as far as it has been followed: ``out`` is what the op would give.

    Until it is rounded, ``out`` is in the wide dtype of the reduction and not in that of ``x``.
    """

    op: str
    x: Value
    out: Value
    eps: float
    weight: Value | None = None
    bias: Value | None = None
    offset: float = 0.0
    round_first: bool = False

    @property
    def is_rounded(self) -> bool:
        """True when the result has come back to the dtype of the input."""
        return self.out.dtype == self.x.dtype


def _raise_spelled(graph: Graph, node: Node) -> bool:
    norm = _core(node)
    if norm is None or norm.out.dtype not in _WIDE:
        return False
    norm = _follow(graph, norm)
    anchor = norm.out.producer
    assert anchor is not None
    x = norm.x
    if not norm.is_rounded:
        # The model goes on in the wide dtype: then that is the dtype of the input too.
        x = graph.insert_before(anchor, "cast", x, dtype=norm.out.dtype).output
    attrs = {"weight_offset": norm.offset, "round_first": norm.round_first}
    params = [norm.weight] if norm.op == "rms_norm" else [norm.weight, norm.bias]
    while params and params[-1] is None:
        params.pop()
    raised = graph.insert_before(
        anchor, norm.op, x, *params, eps=norm.eps, **(attrs if norm.op == "rms_norm" else {})
    )
    graph.replace_all(norm.out, raised.output)
    return True


def _core(node: Node) -> _Norm | None:
    """The norm that a node ends, before any weight."""
    # A LayerNorm is an RMSNorm of what is centred: the larger pattern first.
    for op, pattern in (("layer_norm", _LAYER), ("rms_norm", _RMS)):
        found = match(pattern, node.output)
        if found and found["dim"] in ((-1,), (found["x"].tensor.rank - 1,)):
            return _Norm(op, before_widening(found["x"]), node.output, float(found["eps"]))
    return None


def _follow(graph: Graph, norm: _Norm) -> _Norm:
    """Take in what follows: rounding and weight in either order, and a bias."""
    norm = _take_rounding(graph, norm)
    norm = _take_weight(graph, norm)
    if norm.op == "layer_norm":
        norm = _take_bias(graph, norm)
    return _take_rounding(graph, norm)


def _take_rounding(graph: Graph, norm: _Norm) -> _Norm:
    user = graph.sole_user(norm.out)
    if norm.is_rounded or user is None or user.op != "cast" or user.output.dtype != norm.x.dtype:
        return norm
    return replace(norm, out=user.output)


def _take_weight(graph: Graph, norm: _Norm) -> _Norm:
    user = graph.sole_user(norm.out)
    weight = _param(norm, user, "mul")
    if user is None or weight is None or user.output.type != norm.out.type:
        return norm
    # In f32 nothing is rounded on the way, and both orders are the same.
    round_first = norm.is_rounded and norm.out.dtype not in _WIDE
    if norm.op == "layer_norm":
        # Ours rounds last. Rounded first, the weight is a product of its own.
        if round_first:
            return norm
        return replace(norm, out=user.output, weight=before_widening(weight))
    weight, offset = _without_offset(weight, norm.out.dtype)
    if not round_first:
        weight = before_widening(weight)
    return replace(norm, out=user.output, weight=weight, offset=offset, round_first=round_first)


def _take_bias(graph: Graph, norm: _Norm) -> _Norm:
    user = graph.sole_user(norm.out)
    bias = _param(norm, user, "add")
    if user is None or bias is None or user.output.type != norm.out.type:
        return norm
    if norm.is_rounded and norm.out.dtype not in _WIDE:
        return norm
    return replace(norm, out=user.output, bias=before_widening(bias))


def _param(norm: _Norm, user: Node | None, op: str) -> Value | None:
    """The weight that a node combines with the norm, if its shape is the last dims of ``x``."""
    if user is None or user.op != op or len(user.operands) != 2:
        return None
    param = user.operand(1) if user.operand(0) is norm.out else user.operand(0)
    rank, shape = param.tensor.rank, norm.x.shape
    fits = 0 < rank <= len(shape) and param.shape == shape[-rank:]
    return param if param.is_weight and fits else None


def _without_offset(weight: Value, dtype: str) -> tuple[Value, float]:
    """The stored weight and what the model adds to it in that dtype: ``1 + w`` of Gemma."""
    add = weight.producer
    if add is None or add.op != "add" or add.attrs["scalar"] is None or weight.dtype != dtype:
        return weight, 0.0
    return add.operand(0), float(add.attrs["scalar"])
