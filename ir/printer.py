"""The text form of a graph. ``octavo.ir.parser`` reads it back; docs/architecture.md shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.ir.fold import fold as fold_lines
from octavo.ir.graph import Graph, Node, Origin, Value
from octavo.ir.ops import op_def
from octavo.ir.ops.aten import OperandRef
from octavo.ir.types import SymDim, TensorType

MAX_WEIGHT_PARAMETERS = 8


def print_graph(graph: Graph, *, fold: bool = True, origins: bool = True) -> str:
    """The text of a graph, ending in a newline; ``parse_graph`` gives the graph back.

    ``fold`` prints repeated layers once, with their count. ``origins`` ends lines with the Hugging
    Face module and the values of the previous stage that they came from.
    """
    short = _weights_are_parameters(graph, origins)
    lines = _head(graph, short, origins)
    if graph.weight_nodes and not short:
        made = [f"    {_node(node, origins)}" for node in graph.weight_nodes]
        lines += ["  weights {", *(fold_lines(made) if fold else made), "  }"]
    step = [f"  {_node(node, origins)}" for node in graph.nodes]
    lines += fold_lines(step) if fold else step
    lines.append("  return " + ", ".join(map(str, graph.outputs)) if graph.outputs else "  return")
    return "\n".join([*lines, "}"]) + "\n"


def format_attr(value: Any) -> str:
    """The text of an attribute: a number, truth value, none, string, dim, ``$operand``, or list."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(format_attr, value))}]"
    assert isinstance(value, int | float | SymDim | OperandRef), f"no text for {value!r}"
    return repr(value) if isinstance(value, int | float) else str(value)


def _head(graph: Graph, weights_too: bool, origins: bool) -> list[str]:
    values = [*graph.inputs, *(graph.weights if weights_too else ())]
    parameters = [f"{value}: {value.type}" for value in values]
    comments = [_origin_comment([value]) if origins else "" for value in values]
    if not any(comments):
        return [f"graph @{graph.name}({', '.join(parameters)}) {{"]
    commas = [","] * (len(values) - 1) + [""]
    return [
        f"graph @{graph.name}(",
        *(f"  {''.join(line)}" for line in zip(parameters, commas, comments, strict=True)),
        ") {",
    ]


def _weights_are_parameters(graph: Graph, origins: bool) -> bool:
    """True when every weight is a checkpoint tensor of its own name: they read best in the head."""
    return len(graph.weight_nodes) <= MAX_WEIGHT_PARAMETERS and all(
        node.op == "checkpoint"
        and node.attrs["key"] == node.output.name
        and not (origins and node.output.origin != Origin())
        for node in graph.weight_nodes
    )


def _node(node: Node, origins: bool) -> str:
    results = ", ".join(f"{value}: {value.type}" for value in node.outputs)
    arguments = [*_operands(node), *_attributes(node)]
    comment = _origin_comment(node.outputs) if origins else ""
    return f"{results} = {node.op}({', '.join(arguments)}){comment}"


def _operands(node: Node) -> list[str]:
    inputs = list(node.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    return ["none" if value is None else str(value) for value in inputs]


def _attributes(node: Node) -> list[str]:
    parameters = op_def(node.op).attributes
    shown = []
    for name, value in node.attrs.items():
        if isinstance(value, TensorType):
            continue  # the type on the left of the line says it
        default = parameters[name].default if name in parameters else ...
        # 1, 1.0 and True are equal in Python but not here.
        if type(value) is type(default) and value == default:
            continue
        shown.append(f"{name}={format_attr(value)}")
    return shown


def _origin_comment(values: Sequence[Value]) -> str:
    """One origin when the results share it, else one a result with bars between."""
    origins = list(dict.fromkeys(value.origin for value in values))
    if origins == [Origin()]:
        return ""
    shown = origins if len(origins) == 1 else [value.origin for value in values]
    return "  // " + " | ".join(map(_origin, shown))


def _origin(origin: Origin) -> str:
    parts = []
    if origin.module is not None or origin.source is not None:
        module = "-" if origin.module is None else origin.module or "."
        parts.append(" ".join(["hf:", module, *([origin.source] if origin.source else [])]))
    if origin.values:
        parts.append("from: " + ", ".join(origin.values))
    return " ".join(parts) or "none"
