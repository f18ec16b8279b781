"""Patterns match what they draw, and a name is bound to one value."""

from __future__ import annotations

import pytest

from octavo.ir.graph import Value
from octavo.ir.parser import parse_graph
from octavo.passes.match import Attr, Bind, OneOf, Op, Pattern, Through, match, strip

X, Y = Bind("x"), Bind("y")
MEAN = Op("aten.mean.dim", Op("pow", X, scalar=2), dim=(-1,), keepdim=True)
NORM = Op("mul", X, Op("rsqrt", Op("add", MEAN, scalar=Attr("eps")), bind="root"))


def _last(body: str) -> Value:
    head = "graph @g(%x: f32[T, 4], %z: f32[T, 4], @w: f32[4]) {\n"
    return parse_graph(f"{head}{body}\n  return %out\n}}\n").outputs[0]


def _norm(last: str) -> Value:
    return _last(f"""
      %sq: f32[T, 4] = pow(%x, scalar=2)
      %mean: f32[T, 1] = aten.mean.dim(%sq, dim=[-1], keepdim=true)
      %shifted: f32[T, 1] = add(%mean, scalar=1e-05)
      %root: f32[T, 1] = rsqrt(%shifted)
      %out: f32[T, 4] = {last}""")


@pytest.mark.parametrize("last", ["mul(%x, %root)", "mul(%root, %x)"])
def test_a_norm_in_both_orders(last: str) -> None:
    found = match(NORM, _norm(last))
    assert found is not None
    assert (str(found["x"]), found["eps"], found["root"].op) == ("%x", 1e-05, "rsqrt")


def test_a_name_is_one_value() -> None:
    assert match(NORM, _norm("mul(%z, %root)")) is None


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (Op("add|sub", X, Y), True),
        (Op("mul", X, Y), False),
        (Op("sub", X), False),
        (Op("sub", X, Bind("y", weight=True)), True),
        (Op("sub", Bind("x", weight=True), Y), False),
        (Op("sub", Op("cast", X, dtype="f64"), Y), False),
        (OneOf(Op("mul", X, Y), Op("sub", X, Y)), True),
    ],
)
def test_ops_operands_and_attributes(pattern: Pattern, matches: bool) -> None:
    value = _last('  %a: f32[T, 4] = cast(%x, dtype="f32")\n  %out: f32[T, 4] = sub(%a, @w)')
    assert (match(pattern, value) is not None) is matches


def test_through_binds_the_deepest_and_falls_back() -> None:
    value = _last(
        '  %a: bf16[T, 4] = cast(%x, dtype="bf16")\n  %b: bf16[T, 4] = reshape(%a, shape=[T, 4])\n'
        '  %out: f32[T, 4] = cast(%b, dtype="f32")'
    )
    found = match(Through(X, "cast|reshape"), value)
    assert found is not None
    assert str(found["x"]) == "%x"
    assert str(strip(value, "cast")) == "%b"
    assert match(Through(Op("reshape", X), "cast|reshape"), value) is not None
