"""From the graph's nodes to the lines of a program: what runs once a step is moved to the front.

Lines share the graph's values, and the graph stays as it is. Three things change: nodes that depend
on no hidden state come first; the part of a kernel that depends on the step alone becomes a
``plan.<op>`` line, shared by all layers; and a reshape that strides do not allow as a view becomes
a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from octavo.codegen.kernels import COPY, PLAN, VIEWS, KernelRules, Rule, rule_for
from octavo.ir.graph import Graph, Kind, Node, Origin, Value
from octavo.ir.ops import op_def, resolve
from octavo.ir.types import KVType, TensorType, Type

# Any sizes do, as long as none is 1: strides of dims of size 1 say nothing.
_PROBE = {"T": 7, "S": 5, "B": 3, "R": 2}
_STEP_INPUTS = frozenset(
    ("positions", "slot_mapping", "block_table", "query_start", "seq_lens", "logit_rows")
)


@dataclass(frozen=True)
class PlanType:
    """The type of what a kernel's ``plan`` returns: nothing but that kernel looks inside."""

    key: tuple[Any, ...]
    dtype: str = "plan"


class Line(Node):
    """A node as it stands in the program, with the rule by which it is run."""

    __slots__ = ("rule",)

    def __init__(
        self,
        op: str,
        inputs: Iterable[Value | None],
        attrs: dict[str, Any],
        outputs: Iterable[Value],
        rule: Rule,
    ) -> None:
        super().__init__(op, list(inputs), attrs)
        self.outputs = list(outputs)
        self.rule = rule


@dataclass
class Lines:
    """The lines of a program, and the layout of each value whose strides are known."""

    lines: list[Line] = field(default_factory=list)
    num_early: int = 0  # so many of them, the first, depend on no hidden state
    layouts: dict[Value, Tensor] = field(default_factory=dict)  # on the meta device


def lower(graph: Graph, rules: KernelRules) -> Lines:
    """The lines of a graph, in the order in which they run, by the rules of a target."""
    program = Lines()
    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            program.layouts[value] = _meta(value.type)
    plans: dict[tuple[Any, ...], Value] = {}
    for node in graph.nodes:
        line = _with_scratch(node, rule_for(node, rules))
        program.lines.extend(_with_plan(line, plans))
    early, late = _hoisted(program.lines)
    program.num_early = len(early)
    program.lines = [_laid_out(line, program.layouts) for line in [*early, *late]]
    return program


def is_state(value: Value) -> bool:
    """True for the KV state, which a program changes in place instead of passing it on."""
    return isinstance(value.type, KVType)


def _hoisted(lines: Iterable[Line]) -> tuple[list[Line], list[Line]]:
    """The lines that depend on positions and the step's layout alone, and the others."""
    early: list[Line] = []
    late: list[Line] = []
    made: set[Value] = set()
    for line in lines:
        if all(_is_early(value, made) for value in line.operands):
            early.append(line)
            made.update(line.outputs)
        else:
            late.append(line)
    return early, late


def _is_early(value: Value, made: set[Value]) -> bool:
    is_step_input = value.kind is Kind.INPUT and value.name in _STEP_INPUTS
    return value.is_weight or is_step_input or value in made


def _with_scratch(node: Node, rule: Rule) -> Line:
    """The node as a line; what its kernel needs for itself counts as results that nobody reads."""
    stem = node.outputs[0].name
    scratch = [
        Value(f"{stem}.{keyword}", type_, Kind.STEP, None, Origin())
        for keyword, type_ in rule.scratch
    ]
    outs = (*rule.outs, *(keyword for keyword, _ in rule.scratch))
    rule = replace(rule, outs=outs, scratch=())
    return Line(node.op, node.inputs, node.attrs, [*node.outputs, *scratch], rule)


def _with_plan(line: Line, plans: dict[tuple[Any, ...], Value]) -> list[Line]:
    """The line, reading its kernel's plan of the step, and the line that makes that plan if new."""
    kernel = line.rule.kernel
    if kernel is None or not kernel.plan_operands:
        return [line]
    operands = [line.operand(index) for index in kernel.plan_operands]
    key = (kernel.plan_constants, *operands)
    before = []
    if key not in plans:
        plan_type: Type = PlanType(kernel.plan_constants)  # type: ignore[assignment]
        plans[key] = Value(f"{line.op}_plan", plan_type, Kind.STEP, None, Origin())
        before.append(Line(PLAN + line.op, operands, {}, [plans[key]], Rule((None,), kernel)))
    rest = [value for i, value in enumerate(line.inputs) if i not in kernel.plan_operands]
    return [*before, Line(line.op, [*rest, plans[key]], line.attrs, line.outputs, line.rule)]


def _laid_out(line: Line, layouts: dict[Value, Tensor]) -> Line:
    """Record the strides of a line's results; a reshape that must copy becomes ``copy_reshape``."""
    if line.op in VIEWS:
        source = layouts.get(line.operand(0))
        if source is None:
            return line
        results = _view(line, source)
        if results is not None:
            layouts.update(zip(line.outputs, results, strict=True))
            return line
        line = Line(COPY, line.inputs, line.attrs, line.outputs, Rule(("out",)))
    for value, out in zip(line.outputs, line.rule.outs, strict=True):
        if out is not None:
            layouts[value] = _meta(value.tensor)
    return line


def _view(line: Line, source: Tensor) -> list[Tensor] | None:
    """The results as views of the operand, or None when that is impossible."""
    attrs = {name: resolve(value, _PROBE) for name, value in line.attrs.items()}
    if line.op == "reshape":
        try:
            return [source.view(attrs["shape"])]
        except RuntimeError:
            return None
    result = op_def(line.op).evaluate(source, **attrs)
    return list(result) if isinstance(result, tuple | list) else [result]


def _meta(tensor: TensorType) -> Tensor:
    return torch.empty(tensor.sizes(_PROBE), dtype=tensor.torch_dtype, device="meta")
