"""Names and origins: the Hugging Face module and source line behind each value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

from octavo.ir.graph import Graph, Origin, Value

_FRAME = re.compile(r'File ".*?transformers/models/\w+/(modeling_\w+\.py)", line (\d+)')


def origin_of(node: fx.Node) -> Origin:
    """The innermost module that a node was traced in, and the line of its modelling file."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    # The first component is the traced wrapper's attribute; @1 marks a second call of a module.
    module = re.sub(r"@\d+", "", path).partition(".")[2]
    return Origin(module or None, f"{frames[-1][0]}:{frames[-1][1]}" if frames else None)


def strip_prefix(path: str, prefix: str) -> str:
    """A module path without the base model's attribute: ``model.layers.0`` is ``layers.0``."""
    return path.removeprefix(prefix)


def value_name(module: str | None, op: str, prefix: str) -> str:
    """``layers.0.mlp.mul``: the module and what is done there."""
    role = op.split(".")[1] if op.startswith("aten.") else op
    path = _stripped(module, prefix)
    return f"{path}.{role.strip('_')}" if path else role.strip("_")


def name_module_results(graph: Graph, prefix: str) -> None:
    """Call what a module returns by the module's path: ``layers.0.mlp.down_proj``.

    A module with several results, or one that only hands on a submodule's, names nothing.
    """
    leaving: dict[str, list[Value]] = {}
    for node in graph.nodes:
        for value in node.outputs:
            readers = [user.outputs[0].origin.module for user in graph.users(value)]
            readers += [None] * graph.outputs.count(value)
            for path in _ancestors(value.origin.module):
                if any(not _is_inside(reader, path) for reader in readers):
                    leaving.setdefault(path, []).append(value)
    for path, values in leaving.items():
        name = _stripped(path, prefix)
        if name and len(values) == 1 and values[0].origin.module == path:
            graph.rename(values[0], name)


def _stripped(module: str | None, prefix: str) -> str:
    return strip_prefix(module, prefix) if module and module + "." != prefix else ""


def _ancestors(module: str | None) -> Iterator[str]:
    path = module or ""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _is_inside(module: str | None, path: str) -> bool:
    return module is not None and (module == path or module.startswith(path + "."))
