"""The memory plan: which results share a buffer.

A buffer belongs to a line of the program's text, and so to every call of its layer. Two lines may
share one when no instance of the one is alive while an instance of the other is. What cannot have
a fixed buffer (a result alive while the next call of its layer makes the next one) is left to
PyTorch.

Sizes are bytes per unit of one symbol, ``T`` or ``R`` or ``S``: the capacity is chosen at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx

from octavo.codegen.lower import Line, is_state
from octavo.codegen.schedule import Schedule
from octavo.ir.graph import Value
from octavo.ir.types import SymDim, TensorType

ALIGNMENT = 64  # bytes; rows of a buffer start on a cache line when widths allow


@dataclass
class Buffer:
    """Memory of ``unit_bytes`` for each unit of ``symbol``, shared by the values named."""

    symbol: str
    unit_bytes: int
    values: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Interval:
    """One instance of a value: alive from its line to its last reader's, both included.

    ``overwrites``: the value whose memory the line may take over as it makes this one.
    """

    value: Value
    start: int
    end: int
    overwrites: frozenset[Value]


@dataclass
class MemoryPlan:
    """Buffers, and for each value of the program's text that has one, which."""

    buffers: list[Buffer]
    buffer_of: dict[Value, Buffer]
    unplanned: list[Value]  # would have had a buffer, but are alive for too long

    def bytes_per(self, symbol: str) -> int:
        """Bytes for each unit of a symbol, with sharing."""
        return sum(b.unit_bytes for b in self.buffers if b.symbol == symbol)

    def unshared_bytes_per(self, symbol: str) -> int:
        """Bytes for each unit of a symbol if each value had a buffer of its own."""
        values = (v for b in self.buffers if b.symbol == symbol for v in b.values)
        return sum(_bytes(value) for value in values)


def unit_size(tensor: TensorType) -> tuple[str, int] | None:
    """Symbol and bytes per unit of it; None for a type that is not a multiple of one symbol."""
    symbolic = [dim for dim in tensor.shape if isinstance(dim, SymDim)]
    if len(symbolic) != 1 or symbolic[0].offset:
        return None
    rest = math.prod(dim for dim in tensor.shape if isinstance(dim, int))
    return symbolic[0].symbol, rest * symbolic[0].scale * tensor.torch_dtype.itemsize


def plan_memory(schedule: Schedule) -> MemoryPlan:
    """Give the results that a line can write into memory of ours the fewest bytes of buffers."""
    intervals = live_intervals(schedule)
    conflicts = _interference(intervals)
    unplanned = [value for value in conflicts if conflicts.has_edge(value, value)]
    conflicts.remove_nodes_from(unplanned)
    plan = MemoryPlan([], {}, unplanned)
    for value in sorted(conflicts, key=lambda v: -_bytes(v)):  # stable: ties stay in program order
        _place(value, set(conflicts[value]), plan)
    order = {value: index for index, value in enumerate(conflicts)}
    for buffer in plan.buffers:
        buffer.values.sort(key=order.__getitem__)
    return plan


def _place(value: Value, conflicts: set[Value], plan: MemoryPlan) -> None:
    """Best fit: the smallest buffer that is free. Values come by size, so each one is enough."""
    symbol, _ = unit_size(value.tensor) or ("", 0)
    free = [b for b in plan.buffers if b.symbol == symbol and not conflicts.intersection(b.values)]
    buffer = min(free, key=lambda b: b.unit_bytes, default=None)
    if buffer is None:
        buffer = Buffer(symbol, -(-_bytes(value) // ALIGNMENT) * ALIGNMENT)
        plan.buffers.append(buffer)
    buffer.values.append(value)
    plan.buffer_of[value] = buffer


def _bytes(value: Value) -> int:
    size = unit_size(value.tensor)
    assert size is not None, f"{value} has no planned size"
    return size[1]


def live_intervals(schedule: Schedule) -> list[Interval]:
    """The instances of all values that can have a buffer, over the program with calls expanded."""
    roots: dict[Value, Value] = {}
    text: dict[Value, Value] = {}
    start: dict[Value, int] = {}
    end: dict[Value, int] = {}
    lines = list(schedule.expanded())
    for time, (line, in_text) in enumerate(lines):
        for value in line.operands:
            end[roots.get(value, value)] = time
        for index, value in enumerate(line.outputs):
            if line.rule.alias:
                roots[value] = _only_root(line, roots)
            elif is_planned(line, index):
                text[value] = in_text.outputs[index]
                start[value] = end[value] = time
    for value in schedule.outputs:
        end[roots.get(value, value)] = len(lines)
    return [
        Interval(
            text[value],
            begin,
            end[value],
            _overwritten(lines[begin][0], begin, value, text, roots, end),
        )
        for value, begin in start.items()
    ]


def is_planned(line: Line, index: int) -> bool:
    """Whether a result is written into a buffer of the plan."""
    value = line.outputs[index]
    has_out = line.rule.outs[index] is not None and not is_state(value)
    return has_out and unit_size(value.tensor) is not None


def _only_root(line: Line, roots: Mapping[Value, Value]) -> Value:
    # PyTorch's own ops may give back a view of any operand; ours look at the first.
    operand = line.operand(0)
    return roots.get(operand, operand)


def _overwritten(
    line: Line,
    time: int,
    result: Value,
    text: Mapping[Value, Value],
    roots: Mapping[Value, Value],
    end: Mapping[Value, int],
) -> frozenset[Value]:
    """The operands that die at a line and whose memory its result may take."""
    index = line.outputs.index(result)
    operands = [line.operand(operand) for r, operand in line.rule.in_place if r == index]
    viewed = {roots[v] for v in line.operands if v in roots}  # an overlapping read of other strides
    return frozenset(
        text[v]
        for v in operands
        if v in text and end[v] == time and v.type == result.type and v not in viewed
    )


def _interference(intervals: list[Interval]) -> networkx.Graph:
    """An edge between any two values of the text that are alive at once; a loop is possible."""
    graph = networkx.Graph()
    graph.add_nodes_from(interval.value for interval in intervals)
    alive: list[Interval] = []
    for new in sorted(intervals, key=lambda i: i.start):
        alive = [old for old in alive if old.end >= new.start]
        for old in alive:
            takes_over = old.end == new.start and old.value in new.overwrites
            if not takes_over:
                graph.add_edge(old.value, new.value)
        alive.append(new)
    return graph


def check_memory_plan(schedule: Schedule, plan: MemoryPlan) -> None:
    """Raise AssertionError when two values that are alive at once share a buffer.

    Independent of how the plan was made: it walks the expanded program and looks at each buffer.
    """
    holder: dict[int, list[Interval]] = {}
    for new in sorted(live_intervals(schedule), key=lambda i: i.start):
        buffer = plan.buffer_of.get(new.value)
        if buffer is None:
            continue
        size = unit_size(new.value.tensor)
        assert size is not None, f"{new.value} has a buffer but no size in units of a symbol"
        assert size[0] == buffer.symbol, f"{new.value} is counted in {size[0]}"
        assert size[1] <= buffer.unit_bytes, f"{new.value} does not fit its buffer"
        for old in holder.get(id(buffer), []):
            takes_over = old.end == new.start and old.value in new.overwrites
            is_over = old.end < new.start
            assert is_over or takes_over, f"{new.value} overwrites {old.value}, which is still read"
        holder.setdefault(id(buffer), []).append(new)
