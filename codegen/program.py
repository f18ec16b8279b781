"""The text of ``program.py``: names for everything, then one statement a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.codegen.expressions import (
    aten_text,
    call_text,
    dim_text,
    dtype_text,
    shape_text,
    view_text,
)
from octavo.codegen.kernels import PLAN, VIEWS
from octavo.codegen.loops import CallText, fold_calls
from octavo.codegen.lower import Line, is_state
from octavo.codegen.memory import MemoryPlan
from octavo.codegen.quant_layouts import find_layout
from octavo.codegen.render import KernelSet, environment
from octavo.codegen.schedule import Body, Call, Part, Schedule
from octavo.codegen.scope import Bound, Field, Names, Scope
from octavo.codegen.triton_rules import sampler
from octavo.ir.graph import Graph, Kind, Value
from octavo.ir.ops.aten import _overload
from octavo.ir.types import KVType, QuantType

_LAYER_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


class ProgramWriter:
    """Writes one program; ``text`` is the result."""

    def __init__(
        self, graph: Graph, schedule: Schedule, plan: MemoryPlan, kernels: KernelSet
    ) -> None:
        self.graph = graph
        self.schedule = schedule
        self.plan = plan
        self.kernels = kernels
        states = [v.type for v in graph.inputs if isinstance(v.type, KVType)]
        has_scales = any(state.scales == "token" for state in states)
        self.cache_names = CACHE_NAMES if has_scales else CACHE_NAMES[:2]
        self.views: list[str] = []
        self.buffer_names = Names(("T", "S", "R", "workspace", "block_size", "device"))
        self.planned: dict[Value, str] = {}  # values that are attributes of Buffers
        self._name_buffers()

    def text(self) -> str:
        """The rendered program."""
        bodies = [self._body(body) for body in self.schedule.bodies]
        main = self._main()
        is_cuda = self.kernels.target.kind == "cuda"
        vocab_size = next(v for v in self.schedule.outputs if not is_state(v)).shape[-1]
        sampler_name = self.kernels.module(sampler(vocab_size)) if is_cuda else None
        return (
            environment()
            .get_template("program.py.j2")
            .render(
                graph_name=self.graph.name,
                target=self.kernels.target.kind,
                sampler=sampler_name,
                description=self._description(),
                modules=sorted(self.kernels.rendered),
                buffers=self._buffers(),
                bodies=bodies,
                views=[text for line in self.views for text in wrapped(line)],
                fields=self._fields(main),
                main=[text for line in main.lines for text in wrapped(line)],
                kv_slot="Tensor, Tensor" if len(self.cache_names) == 2 else "Tensor, ...",
                has_kv=any(is_state(value) for value in self.graph.inputs),
                uses_functional=any("F.embedding" in line for line in _all_lines(main, bodies)),
            )
        )

    # Buffers

    def _name_buffers(self) -> None:
        """Name the planned results and those of their views that have one place for all calls."""
        index = {id(buffer): number for number, buffer in enumerate(self.plan.buffers)}
        for lines in self._functions():
            own: set[Value] = set()  # an argument is elsewhere in each call: no fixed view of it
            for line in lines:
                for value in line.outputs:
                    if value in self.plan.buffer_of:
                        own.add(value)
                        self._fixed_buffer(value, index[id(self.plan.buffer_of[value])])
                if line.op in VIEWS and line.operand(0) in own:
                    own.update(line.outputs)
                    self._fixed_view(line)

    def _functions(self) -> list[Sequence[Line]]:
        """The lines of the main function and of each body."""
        main = [step for step in self.schedule.steps if isinstance(step, Line)]
        return [main, *(body.part.lines for body in self.schedule.bodies)]

    def _fixed_buffer(self, value: Value, number: int) -> None:
        name = self.planned[value] = self.buffer_names.new(value.name)
        sizes = ", ".join(dim_text(dim, "") for dim in value.shape)
        place = f"memory[{number}], {dtype_text(value.dtype)}, {sizes}"
        self.views.append(f"self.{name} = view({place})")

    def _fixed_view(self, line: Line) -> None:
        for value in line.outputs:
            self.planned[value] = self.buffer_names.new(value.name)
        targets = ", ".join(f"self.{self.planned[value]}" for value in line.outputs)
        if len(line.outputs) == 1 and line.op == "split":
            targets = f"({targets},)"
        source = f"self.{self.planned[line.operand(0)]}"
        self.views.append(f"{targets} = {view_text(line, source, '', is_viewable=True)}")

    def _buffers(self) -> list[dict[str, Any]]:
        return [
            {
                "symbol": buffer.symbol,
                "unit_bytes": buffer.unit_bytes,
            }
            for buffer in self.plan.buffers
        ]

    # Functions

    def _body(self, body: Body) -> dict[str, Any]:
        scope = Scope("w")
        names = Names(("w", "b", "torch", "F"))
        # Named after the last call's arguments: the first call's come from outside the layers.
        last = [call for call in self.schedule.calls if call.body is body][-1]
        for value, named in zip(body.part.arguments, last.part.arguments, strict=True):
            scope.names[value] = names.new(named.name)
        for number, slot in enumerate(body.part.slots):
            suffix = "" if len(body.part.slots) == 1 else f"_{number}"
            scope.caches[slot] = tuple(f"{name}{suffix}" for name in self.cache_names)
        for line in body.part.lines:
            self._statement(line, scope, names)
        results = [self._operand(value, scope) for value in body.results]
        if results:
            scope.lines.append(f"return {', '.join(results)}")
        return self._body_model(body, scope)

    def _body_model(self, body: Body, scope: Scope) -> dict[str, Any]:
        calls = [call for call in self.schedule.calls if call.body is body]
        order = [list(body.part.weights).index(value) for value in _read(scope)]
        parameters = [
            f"{scope.names[value]}: {_annotation(value)}" for value in body.part.arguments
        ]
        returned = [_annotation(value) for value in body.results]
        return {
            "name": body.name,
            "class_name": "".join(word.capitalize() for word in body.name.split("_")),
            "table_name": f"{body.name.upper()}_CALLS",
            "fields": self._body_fields(body, scope),
            "calls": [_call_model(call.part, order) for call in calls],
            "parameters": parameters,
            "returns": returned[0] if len(returned) == 1 else f"tuple[{', '.join(returned)}]",
            "doc": f"One layer; {len(calls)} of the model's layers are calls of this.",
            "lines": [text for line in scope.lines for text in wrapped(line)],
        }

    def _body_fields(self, body: Body, scope: Scope) -> list[Field]:
        fields = []
        places = {value: index for index, value in enumerate(_read(scope))}
        for weight, name in scope.weights.items():
            fetched = weight.expression(f"names[{places[weight.value]}]", is_literal=False)
            annotation = "Any" if len(weight.parts) > 1 else "Tensor"
            fields.append(Field(name, fetched, f"  # {weight.value.type}", annotation))
        for index, slot in enumerate(body.part.slots):
            for half, name in enumerate(scope.caches[slot]):
                bound, comment = _bound_cache(f"kv_caches[slots[{index}]]", half)
                fields.append(Field(name, bound, comment))
        return fields

    def _main(self) -> Scope:
        scope = Scope("self")
        names = Names(
            ("self", "b", "w", "torch", "F", *(value.name for value in self.graph.inputs))
        )
        scope.names.update((value, value.name) for value in self.graph.inputs)
        last_use = self._last_uses()
        calls: dict[int, CallText] = {}
        for time, step in enumerate(self.schedule.steps):
            if isinstance(step, Line):
                self._statement(step, scope, names)
            else:
                call = calls[len(scope.lines)] = self._call(step, scope, time, last_use)
                scope.lines.append(call.statement(f"self.{call.body}s[{call.number}]"))
        logits = next(value for value in self.schedule.outputs if not is_state(value))
        result = self._operand(logits, scope)
        scope.lines.append(f"return {result}{'' if logits.dtype == 'f32' else '.float()'}")
        counts = Counter(call.body for call in calls.values())
        scope.lines = fold_calls(scope.lines, calls, counts)
        return scope

    def _last_uses(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for time, step in enumerate(self.schedule.steps):
            read = step.operands if isinstance(step, Line) else step.part.arguments
            last.update((value, time) for value in read)
        last.update((value, len(self.schedule.steps)) for value in self.schedule.outputs)
        return last

    def _call(self, call: Call, scope: Scope, time: int, last_use: dict[Value, int]) -> CallText:
        """A call of a layer; its results take over the last call's names where those are free."""
        number = [c for c in self.schedule.calls if c.body is call.body].index(call)
        arguments = tuple(self._operand(value, scope) for value in call.part.arguments)
        held = {name for value, name in scope.names.items() if last_use.get(value, -1) > time}
        targets = []
        for value, own in zip(call.body.results, call.results, strict=True):
            name = f"{call.body.name}_{Names().new(value.name)}"
            scope.names[own] = Names(held).new(name)
            held.add(scope.names[own])
            targets.append(scope.names[own])
        return CallText(call.body.name, number, tuple(targets), arguments)

    def _fields(self, main: Scope) -> list[Field]:
        fields = []
        for weight, name in main.weights.items():
            key = f'"{weight.value.name}"'
            fields.append(Field(name, weight.expression(key, is_literal=True)))
        for slot, names in main.caches.items():
            for half, name in enumerate(names):
                fields.append(Field(name, _bound_cache(f"kv_caches[{slot}]", half)[0]))
        return fields

    # Statements

    def _statement(self, line: Line, scope: Scope, names: Names) -> None:
        if line.op in VIEWS and all(value in self.planned for value in line.outputs):
            return  # made once for all steps of a size, in Buffers
        self._comment(line, scope)
        if line.rule.kernel is not None:
            text = self._kernel_text(line, scope, names)
        elif line.op in VIEWS:
            operand = line.operand(0)
            text = view_text(line, self._operand(operand, scope))
        elif line.op.startswith("aten."):
            text = aten_text(line, self._operands(line, scope, keep_none=True))
        else:
            out = self._out(line, 0, scope, names)
            scope.lines.append(call_text(line, self._operands(line, scope), out))
            return
        scope.lines.append(self._assigned(line, text, scope, names))

    def _assigned(self, line: Line, text: str, scope: Scope, names: Names) -> str:
        """The statement, keeping those results that no buffer was given for."""
        new = [
            value
            for value, out in zip(line.outputs, line.rule.outs, strict=True)
            if out is None and not is_state(value)
        ]
        if not new:
            return text
        for value in new:
            scope.names[value] = names.new(value.name)
        targets = ", ".join(scope.names[value] for value in new)
        is_list = len(new) == 1 and (line.op == "split" or _returns_list(line))
        return f"({targets},) = {text}" if is_list else f"{targets} = {text}"

    def _kernel_text(self, line: Line, scope: Scope, names: Names) -> str:
        kernel = line.rule.kernel
        assert kernel is not None, f"{line} has no kernel"
        module = self.kernels.module(kernel)
        if line.op.startswith(PLAN):
            extra = ["self.block_size"] if line.op == f"{PLAN}paged_attention" else []
            return f"{module}.plan({', '.join([*self._operands(line, scope), *extra])})"
        arguments = self._operands(line, scope, module)
        for index, out in enumerate(line.rule.outs):
            if out is not None:
                arguments.append(f"{out}={self._out(line, index, scope, names)}")
        arguments.extend(f"{keyword}=b.{keyword}" for keyword in kernel.keywords)
        return f"{module}.run({', '.join(arguments)})"

    def _out(self, line: Line, index: int, scope: Scope, names: Names) -> str:
        """Where a result goes: its buffer, or new memory when it has none."""
        value = line.outputs[index]
        if value not in self.planned:
            scope.names[value] = names.new(value.name)
            device = ", device=b.device" if self.kernels.target.kind == "cuda" else ""
            made = f"{shape_text(value.tensor)}, dtype={dtype_text(value.dtype)}{device}"
            scope.lines.append(f"{scope.names[value]} = torch.empty({made})")
        return self._operand(value, scope)

    def _operands(
        self,
        line: Line,
        scope: Scope,
        module: str | None = None,
        *,
        keep_none: bool = False,
    ) -> list[str]:
        """The operands as the statement reads them; ``module`` is that of the line's kernel."""
        texts = []
        kernel = line.rule.kernel if module else None
        prepared, layouts = (kernel.prepared, dict(kernel.layouts)) if kernel else ((), {})
        for index, value in enumerate(line.inputs):
            if value is None:
                texts.extend(["None"] if keep_none else [])
            elif is_state(value):
                texts.extend(self._caches(line.attrs["slot"], scope))
            else:
                prepare = module if index in prepared and value.is_weight else None
                parts = tuple(_part_names(value, layouts[index])) if index in layouts else ()
                forms = [parts] if prepare or not parts else [(part,) for part in parts]
                texts.extend(self._operand(value, scope, form, prepare) for form in forms)
        return texts

    def _operand(
        self,
        value: Value,
        scope: Scope,
        parts: tuple[str, ...] = (),
        prepare: str | None = None,
    ) -> str:
        if value in scope.names:
            return scope.names[value]
        if value.kind is not Kind.WEIGHT:
            return f"b.{self.planned[value]}"
        key = Bound(value, parts, prepare)
        if key not in scope.weights:
            taken = Names([*scope.weights.values(), *_PROGRAM_ATTRIBUTES])
            scope.weights[key] = taken.new(key.name)
        return f"{scope.holder}.{scope.weights[key]}"

    def _caches(self, slot: int, scope: Scope) -> list[str]:
        names = tuple(f"{name}_{slot}" for name in self.cache_names)
        caches = scope.caches.setdefault(slot, names)
        return [f"{scope.holder}.{name}" for name in caches]

    def _comment(self, line: Line, scope: Scope) -> None:
        """Name the Hugging Face module where it changes; layers' numbers are stars in a body."""
        module = line.outputs[0].origin.module
        if line.op.startswith(PLAN):
            module = "once a step, for all layers"
        if module is not None and scope.holder == "w":
            module = _LAYER_NUMBER.sub(".*", module)
        if module is not None and module != scope.module:
            scope.lines.append(f"# {module}")
            scope.module = module

    def _description(self) -> str:
        counts = [
            f"{sum(c.body is b for c in self.schedule.calls)} of `_{b.name}`"
            for b in self.schedule.bodies
        ]
        if not counts:
            return "All lines stand in `Program.__call__`."
        return f"The layers are {len(self.schedule.calls)} calls: {', '.join(counts)}."


def wrapped(statement: str) -> list[str]:
    """A statement on one line if it is short, else with a call's arguments on their own line."""
    if len(statement) <= _LINE_WIDTH or not statement.endswith(")"):
        return [statement]
    depth, start = 0, len(statement)
    while depth or start == len(statement):
        start -= 1
        depth += {")": 1, "(": -1}.get(statement[start], 0)
    inside, indent = statement[start + 1 : -1], " " * (len(statement) - len(statement.lstrip()))
    return [statement[: start + 1], f"{indent}    {inside}", f"{indent})"]


_LINE_WIDTH = 88
_PROGRAM_ATTRIBUTES = (
    *("capacity", "memory", "buffers", "block_size", "keys", "values"),
    *("key_scales", "value_scales", "device", "workspace", "sampler"),
)


# What a slot of the KV cache is made of; the last two where tokens have scales.
CACHE_NAMES = ("keys", "values", "key_scales", "value_scales")


def _bound_cache(slot: str, index: int) -> tuple[str, str]:
    """The expression that fetches a part of a slot, and what is said of it."""
    if index < 2:
        return f"{slot}[{index}].flatten(0, 1)", "  # flat: [num_blocks * block_size, heads, dim]"
    return f"{slot}[{index}]", "  # [num_blocks, heads, block_size]"


def _annotation(value: Value) -> str:
    return "Any" if value.dtype == "plan" else "Tensor"


def _read(scope: Scope) -> list[Value]:
    """The weights that a function reads, each once."""
    return list(dict.fromkeys(weight.value for weight in scope.weights))


def _part_names(value: Value, layout: str) -> Iterable[str]:
    assert isinstance(value.type, QuantType), f"{value} is a {value.type} with a layout"
    return find_layout(layout).part_types(value.type)


def _returns_list(line: Line) -> bool:
    if not line.op.startswith("aten."):
        return False
    return "List" in str(_overload(line.op)._schema.returns[0].type)


def _all_lines(main: Scope, bodies: Iterable[dict[str, Any]]) -> list[str]:
    return [*main.lines, *(line for body in bodies for line in body["lines"])]


def _call_model(part: Part, order: Sequence[int]) -> dict[str, Any]:
    return {
        "weights": [f'"{part.weights[index].name}"' for index in order],
        "slots": repr(part.slots),
    }
