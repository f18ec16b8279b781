"""The order of a program's lines, and its layers: one body for all layers that do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.codegen.lower import Line, is_state
from octavo.ir.graph import Value

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)(?:\.|$)")
# Fused ops move a line or two over a layer's edge (the residual add into the next layer's norm), so
# the edges are tried this many lines to either side.
_MAX_SHIFT = 8


@dataclass(frozen=True)
class Part:
    """The lines of one layer, seen from outside: what it reads and what others read of it."""

    lines: tuple[Line, ...]
    weights: tuple[Value, ...]
    arguments: tuple[Value, ...]
    slots: tuple[int, ...]

    @property
    def values(self) -> list[Value]:
        """All results of the lines, in order."""
        return [value for line in self.lines for value in line.outputs]


@dataclass(frozen=True)
class Body:
    """A function of the program: the lines of its first call stand for those of every call.

    ``results`` are those of its values that some call's surroundings read.
    """

    name: str
    part: Part
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Call:
    """One call of a body; ``part`` are the lines that it stands for."""

    body: Body
    part: Part

    @property
    def results(self) -> list[Value]:
        """The values of this call that the body's results stand for."""
        own = dict(zip(self.body.part.values, self.part.values, strict=True))
        return [own[value] for value in self.body.results]


@dataclass(frozen=True)
class Schedule:
    """What a step does: lines and calls of layer bodies, in order."""

    steps: tuple[Line | Call, ...]
    bodies: tuple[Body, ...]
    outputs: tuple[Value, ...]

    @property
    def calls(self) -> list[Call]:
        """The calls of layer bodies, in order."""
        return [step for step in self.steps if isinstance(step, Call)]

    def expanded(self) -> Iterator[tuple[Line, Line]]:
        """Every line that runs, with the line of the program's text that it is an instance of."""
        for step in self.steps:
            if isinstance(step, Line):
                yield step, step
            else:
                yield from zip(step.part.lines, step.body.part.lines, strict=True)


def layer_of(name: str) -> int | None:
    """The layer that a value's name puts it in: 3 for ``layers.3.mlp.up``."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def make_schedule(lines: Sequence[Line], outputs: Sequence[Value], num_early: int = 0) -> Schedule:
    """Cut the lines into layers so that they have as few distinct bodies as possible.

    The first ``num_early`` lines belong to no layer, whatever they are called.
    """
    cuts = _cuts(lines, num_early)
    if len(cuts) < 3:  # one layer or none: a function would be called once
        return Schedule(tuple(lines), (), tuple(outputs))
    lead, tail = cuts[0] - num_early, len(lines) - cuts[-1]
    shifts = range(-min(lead, _MAX_SHIFT), min(tail, _MAX_SHIFT) + 1)
    best = min((_cut(lines, [c + s for c in cuts]) for s in sorted(shifts, key=abs)), key=_cost)
    return _assemble(lines, best[0], best[1], outputs)


def _cuts(lines: Sequence[Line], num_early: int) -> list[int]:
    """Where each layer starts, and where the last one ends; empty when layers are not in a row."""
    starts: dict[int, int] = {}
    end = 0
    for index, line in enumerate(lines):
        layer = layer_of(line.outputs[0].name)
        if layer is not None and index >= num_early:
            starts.setdefault(layer, index)
            end = index + 1
    cuts = [*starts.values(), end]
    in_order = list(starts) == list(range(len(starts))) and cuts == sorted(set(cuts))
    return cuts if in_order else []


def _cut(lines: Sequence[Line], cuts: Sequence[int]) -> tuple[list[int], list[Part]]:
    parts = [_part(lines[a:b]) for a, b in pairwise(cuts)]
    return list(cuts), parts


def _cost(cut: tuple[list[int], list[Part]]) -> tuple[int, int]:
    parts = cut[1]
    return len({_signature(part) for part in parts}), sum(len(part.arguments) for part in parts)


def _part(lines: Sequence[Line]) -> Part:
    own = {value for line in lines for value in line.outputs}
    read = dict.fromkeys(v for line in lines for v in line.operands if v not in own)
    slots = dict.fromkeys(line.attrs["slot"] for line in lines if "slot" in line.attrs)
    return Part(
        tuple(lines),
        tuple(v for v in read if v.is_weight),
        tuple(v for v in read if not v.is_weight and not is_state(v)),
        tuple(slots),
    )


def _signature(part: Part) -> tuple[Any, ...]:
    """Equal for parts that do the same: names, weights' values and KV slot numbers do not count."""
    number: dict[Value, Any] = {value: ("w", i) for i, value in enumerate(part.weights)}
    number.update({value: ("a", i) for i, value in enumerate(part.arguments)})
    number.update({value: ("v", i) for i, value in enumerate(part.values)})
    slot_number = {slot: i for i, slot in enumerate(part.slots)}
    signature: list[Any] = [v.type for v in (*part.weights, *part.arguments)]
    for line in part.lines:
        operands = tuple(
            None if v is None else "kv" if is_state(v) else number[v] for v in line.inputs
        )
        attrs = tuple(
            (name, slot_number[value] if name == "slot" else value)
            for name, value in line.attrs.items()
        )
        types = tuple("kv" if is_state(v) else v.type for v in line.outputs)
        signature.append((line.op, line.rule, operands, attrs, types))
    return tuple(signature)


def _assemble(
    lines: Sequence[Line], cuts: Sequence[int], parts: Sequence[Part], outputs: Sequence[Value]
) -> Schedule:
    groups: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        groups.setdefault(_signature(part), []).append(part)
    bodies = {
        signature: _body(number, group, len(groups), _read_outside(lines, group, outputs))
        for number, (signature, group) in enumerate(groups.items())
    }
    calls = [Call(bodies[_signature(part)], part) for part in parts]
    steps: tuple[Line | Call, ...] = (*lines[: cuts[0]], *calls, *lines[cuts[-1] :])
    return Schedule(steps, tuple(bodies.values()), tuple(outputs))


def _body(number: int, group: Sequence[Part], num_bodies: int, read: set[Value]) -> Body:
    first = group[0]
    results = [
        value
        for index, value in enumerate(first.values)
        if not is_state(value) and any(part.values[index] in read for part in group)
    ]
    return Body("layer" if num_bodies == 1 else f"layer_{number}", first, tuple(results))


def _read_outside(
    lines: Sequence[Line], group: Sequence[Part], outputs: Sequence[Value]
) -> set[Value]:
    """The values of the parts that lines of other parts, or the results, read."""
    owner = {value: index for index, part in enumerate(group) for value in part.values}
    home = {id(line): index for index, part in enumerate(group) for line in part.lines}
    read = set(outputs) & owner.keys()
    for line in lines:
        read.update(v for v in line.operands if v in owner and owner[v] != home.get(id(line)))
    return read
