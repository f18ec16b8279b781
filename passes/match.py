"""Patterns on the graph, as data.

    X, W, EPS = Bind("x"), Bind("w"), Attr("eps")
    WIDE = Through(X, "cast")
    MEAN = Op("aten.mean.dim", Op("pow", WIDE, scalar=2), dim=(-1,), keepdim=True)
    NORM = Op("mul", WIDE, Op("rsqrt", Op("add", MEAN, scalar=EPS)))

    found = match(NORM, value)     # {"x": %x, "eps": 1e-05} or None

A pattern is matched from a value upwards. A name bound twice has to be the same value both times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.ir.graph import Node, Value

COMMUTATIVE = frozenset({"add", "mul"})

Bindings = dict[str, Any]


class Pattern:
    """Something that a value may look like."""

    def find(self, value: Value, found: Bindings) -> Iterator[Bindings]:
        """The ways in which the value looks like this, given what was bound before."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bind(Pattern):
    """Any value; remembered under a name. ``weight=True`` takes only weights, False only others."""

    name: str
    weight: bool | None = None

    def find(self, value: Value, found: Bindings) -> Iterator[Bindings]:
        """Bind the value, or compare it with what the name is bound to."""
        if self.weight is not None and value.is_weight is not self.weight:
            return
        if found.get(self.name, value) is value:
            yield {**found, self.name: value}


@dataclass(frozen=True)
class Attr:
    """Any value of an attribute, remembered under a name."""

    name: str


class Op(Pattern):
    """The result of an op whose operands and attributes match.

    ``name`` may hold alternatives, ``"silu|gelu"``. Absent optional operands count for nothing, so
    an op is matched with just the operands it has. Attributes that are not named may be anything.
    An op of COMMUTATIVE is tried with its two operands in either order. ``bind`` remembers the
    node.
    """

    def __init__(
        self, name: str, *operands: Pattern, bind: str | None = None, **attrs: object
    ) -> None:
        self.names = frozenset(name.split("|"))
        self.operands = operands
        self.bind = bind
        self.attrs = attrs

    def find(self, value: Value, found: Bindings) -> Iterator[Bindings]:
        """Match the node that makes the value, then its operands, left to right."""
        node = value.producer
        if node is None or node.op not in self.names or node.outputs[0] is not value:
            return
        bound = self._attributes(node, found)
        if bound is None or len(node.operands) != len(self.operands):
            return
        yield from _find_all(self.operands, node.operands, bound)
        if node.op in COMMUTATIVE and len(node.operands) == 2:
            yield from _find_all(self.operands, node.operands[::-1], bound)

    def _attributes(self, node: Node, found: Bindings) -> Bindings | None:
        bound = {**found, self.bind: node} if self.bind else dict(found)
        for name, wanted in self.attrs.items():
            got = node.attrs.get(name)
            if isinstance(wanted, Attr):
                if got is None or bound.setdefault(wanted.name, got) != got:
                    return None
            elif got != wanted:
                return None
        return bound


@dataclass(frozen=True)
class Through(Pattern):
    """The pattern, with any number of these one-operand ops (``"cast|reshape"``) on top of it.

    Without any on top is tried last, so that a Bind below binds what lies deepest.
    """

    pattern: Pattern
    ops: str

    def find(self, value: Value, found: Bindings) -> Iterator[Bindings]:
        """Look below the op that makes the value first, then at the value itself."""
        node = value.producer
        if node is not None and node.op in self.ops.split("|"):
            yield from self.find(node.operand(0), found)
        yield from self.pattern.find(value, found)


class OneOf(Pattern):
    """The first of several patterns that matches."""

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns

    def find(self, value: Value, found: Bindings) -> Iterator[Bindings]:
        """All ways of all the patterns, in order."""
        for pattern in self.patterns:
            yield from pattern.find(value, found)


def match(pattern: Pattern, value: Value) -> Bindings | None:
    """The bindings of the first way in which a value matches, or None."""
    return next(pattern.find(value, {}), None)


def strip(value: Value, *ops: str) -> Value:
    """The value below any number of one-operand ops of these names."""
    while value.producer is not None and value.producer.op in ops:
        value = value.producer.operand(0)
    return value


def _find_all(
    patterns: tuple[Pattern, ...], values: list[Value], found: Bindings
) -> Iterator[Bindings]:
    if not patterns:
        yield found
        return
    for bound in patterns[0].find(values[0], found):
        yield from _find_all(patterns[1:], values[1:], bound)
