"""The reference interpreter: runs a graph at any stage, slowly and plainly; the passes' oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.ir.bind import bind_inputs, check_result
from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import op_def, resolve
from octavo.ir.ops.paged import KVState
from octavo.ir.ops.registry import EVALUATION_ERRORS, reason
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.weight_cache import WeightCache, WeightSource

__all__ = [
    "Observer",
    "Result",
    "WeightCache",
    "WeightSource",
    "interpret",
    "last_uses",
    "run_node",
]

Result = Tensor | QuantTensor | KVState
Observer = Callable[[Node, list[Result]], None]


def interpret(
    graph: Graph,
    inputs: Mapping[str, Result],
    weights: WeightSource | WeightCache,
    *,
    observe: Observer | None = None,
) -> list[Result]:
    """Run a graph and return its results in order.

    ``inputs`` maps parameter names without ``%`` to tensors; their shapes give the sizes of the
    symbols. A ``KVState`` is changed in place. ``observe`` sees each node of the step with its
    results. Raises VerifyError for inputs that do not fit the declared types, and for a node that
    fails or whose results are not of the declared shape and dtype.
    """
    sizes = bind_inputs(graph, inputs)
    cache = weights if isinstance(weights, WeightCache) else WeightCache(graph, weights)
    values: dict[Value, Result] = {value: inputs[value.name] for value in graph.inputs}
    dying = last_uses(graph)
    with torch.no_grad():
        for node in graph.nodes:
            results = run_node(node, [_operand(v, values, cache) for v in node.inputs], sizes)
            values.update(zip(node.outputs, results, strict=True))
            if observe is not None:
                observe(node, results)
            for value in dying.get(node, ()):
                del values[value]
    return [cache.get(v) if v.is_weight else values[v] for v in graph.outputs]


def _operand(
    value: Value | None, values: Mapping[Value, Result], cache: WeightCache
) -> Result | None:
    if value is None:
        return None
    return cache.get(value) if value.is_weight else values[value]


def run_node(node: Node, operands: list[Result | None], sizes: Mapping[str, int]) -> list[Result]:
    """One node's results, checked against the types that it declares. Raises VerifyError."""
    attrs: dict[str, Any] = {name: resolve(value, sizes) for name, value in node.attrs.items()}
    try:
        found = op_def(node.op).evaluate(*operands, **attrs)
    except EVALUATION_ERRORS as error:
        raise VerifyError(f"{node} fails: {reason(error)}") from error
    results = list(found) if isinstance(found, tuple | list) else [found]
    if len(results) != len(node.outputs):
        raise VerifyError(f"{node}: expected {len(node.outputs)} results, got {len(results)}")
    for value, result in zip(node.outputs, results, strict=True):
        check_result(value, result, sizes)
    return results


def last_uses(graph: Graph) -> dict[Node, list[Value]]:
    """For each node the values that nothing reads after it, its own unread results included."""
    last: dict[Value, Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.outputs, node))
        last.update((value, node) for value in node.operands if not value.is_weight)
    dying: dict[Node, list[Value]] = {}
    for value, node in last.items():
        if value not in graph.outputs:
            dying.setdefault(node, []).append(value)
    return dying
