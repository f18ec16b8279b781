"""raise-activation: activations spelled out become one op, and so do gated ones.

GELU and SiLU come in the spellings of transformers' activations.py and of bloom. An activation that
is multiplied by another value of its type is the gate of a gated unit (Shazeer 2020).
"""

from __future__ import annotations

import math

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.match import Attr, Bind, Bindings, OneOf, Op, Pattern, match

_X = Bind("x")
_GATES = ("silu", "gelu", "relu", "sigmoid")


def _half_x_times(factor: Pattern) -> Pattern:
    """``0.5 * x * (1 + factor)`` in its groupings."""
    plus_one = Op("add", factor, scalar=1)
    return OneOf(
        Op("mul", Op("mul", _X, scalar=0.5), plus_one),
        Op("mul", _X, Op("mul", plus_one, scalar=0.5)),
        Op("mul", Op("mul", _X, plus_one), scalar=0.5),
    )


_CUBE = OneOf(Op("pow", _X, scalar=3), Op("mul", Op("mul", _X, _X), _X))
_SUM = Op("mul", Op("add", _X, Op("mul", _CUBE, scalar=Attr("cubic"))), scalar=Attr("scale"))
_FACTORED = Op(
    "mul",
    Op("mul", _X, scalar=Attr("scale")),
    Op("add", Op("mul", Op("mul", _X, scalar=Attr("cubic")), _X), scalar=1),
)
_GELU_TANH = _half_x_times(Op("tanh", OneOf(_SUM, _FACTORED)))
_GELU_ERF = _half_x_times(
    Op(
        "aten.erf.default",
        OneOf(Op("div", _X, scalar=Attr("root")), Op("mul", _X, scalar=Attr("inverse_root"))),
    )
)
_SILU = Op("mul", _X, Op("sigmoid", _X))
_QUICK_GELU = Op("mul", _X, Op("sigmoid", Op("mul", _X, scalar=Attr("scale"))))

# Sources write them with six to sixteen digits.
_CONSTANTS = {
    "cubic": 0.044715,
    "scale": math.sqrt(2 / math.pi),
    "root": math.sqrt(2),
    "inverse_root": math.sqrt(0.5),
}


@register_pass("raise-activation")
def raise_activation(graph: Graph, report: Report) -> int:
    """Raise what is spelled out, then fuse each activation with the product that it gates."""
    count = sum(_raise_spelled(graph, node, report) for node in graph.find("mul"))
    graph.sweep()
    return count + sum(_fuse_gate(graph, node, report) for node in graph.find("mul"))


def _raise_spelled(graph: Graph, mul: Node, report: Report) -> bool:
    found = match(_SILU, mul.output)
    if found:
        raised = graph.insert_before(mul, "silu", found["x"])
        graph.replace_all(mul.output, raised.output)
        return True
    for pattern, approximate in ((_GELU_TANH, "tanh"), (_GELU_ERF, "none")):
        found = match(pattern, mul.output)
        if found and not _has_gelu_constants(found):
            return report.missed(mul, "shaped like a GELU, but with other constants")
        if found:
            raised = graph.insert_before(mul, "gelu", found["x"], approximate=approximate)
            graph.replace_all(mul.output, raised.output)
            return True
    return False


def _has_gelu_constants(found: Bindings) -> bool:
    given = ((name, value) for name, value in found.items() if name in _CONSTANTS)
    return all(math.isclose(value, _CONSTANTS[name], rel_tol=1e-6) for name, value in given)


def _fuse_gate(graph: Graph, mul: Node, report: Report) -> bool:
    if len(mul.operands) != 2:
        return False
    for act, up in (mul.operands, mul.operands[::-1]):
        node = graph.producer(act, *_GATES)
        if node is not None:
            return _fuse(graph, mul, node, up, report)
    return False


def _fuse(graph: Graph, mul: Node, act: Node, up: Value, report: Report) -> bool:
    gate = act.operand(0)
    if up is act.output:
        return report.missed(mul, f"{act.op} squared, not gated")
    if up.type != gate.type:
        return report.missed(mul, f"{act.op} {gate.type} times {up.type} is no gated unit")
    if match(_QUICK_GELU, mul.output):
        return report.missed(mul, "QuickGELU has no op of its own")
    if graph.sole_user(act.output) is not mul:
        return report.missed(mul, f"the result of {act.op} is also read elsewhere")
    gated = graph.insert_before(mul, "gated_activation", gate, up, activation=_key(act))
    graph.replace_all(mul.output, gated.output)
    return True


def _key(act: Node) -> str:
    """The activation's name in ``gated_activation``."""
    return "gelu_tanh" if act.attrs.get("approximate") == "tanh" else act.op
