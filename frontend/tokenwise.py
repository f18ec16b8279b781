"""Checking that tokens meet in attention and nowhere else.

A compiled step lays the tokens of many sequences end to end and cuts long prompts into chunks. That
is right only if every value of a token, attention aside, depends on that token and its position
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import op_def, resolve
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import SymDim, TensorType
from octavo.ir.weight_cache import WeightCache

_TOKENS = SymDim("T")
_ROWS = (4, 1, 3)  # some of six tokens, in another order: catches sums, scans and shifts alike
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # mixing shows at the size of the values
_COARSE = 2.0**-3


def check_tokenwise(graph: Graph, weights: WeightCache, max_position: int, num_ids: int) -> None:
    """Raise RefusedArchitecture naming the first operation that lets tokens influence each other.

    The graph is run on six tokens and on three of them, each attending only to itself; the logits
    of the three have to be the same in both runs.
    """
    ids = torch.tensor([[(5 + 37 * i) % num_ids for i in range(6)]])
    positions = torch.tensor([[(3 + 5 * i) % max_position for i in range(6)]])
    rows = list(_ROWS)
    everyone = _run(graph, ids, positions, weights)
    some = _run(graph, ids[:, rows], positions[:, rows], weights)
    if all(_agree(value, everyone[value], some[value]) for value in graph.outputs):
        return
    for value, result in everyone.items():
        if not _agree(value, result, some[value]):
            where = value.origin.module or "the model"
            raise RefusedArchitecture(
                f"in {where}, {value.producer.op if value.producer else 'input'} lets"
                f" tokens influence each other outside attention ({value}), as a recurrence or a"
                " convolution over time does"
            )


def _agree(value: Value, everyone: Tensor, some: Tensor) -> bool:
    assert isinstance(value.type, TensorType)
    axes = [axis for axis, dim in enumerate(value.shape) if isinstance(dim, SymDim)]
    if any(value.shape[axis] != _TOKENS for axis in axes) or len(axes) > 1:
        return True  # merged with another dim; its readers will show
    expected = everyone.index_select(axes[0], torch.tensor(_ROWS)) if axes else everyone
    if not expected.is_floating_point():
        return torch.equal(expected, some)
    wide, other = expected.double(), some.double()
    scale = max(1.0, float(wide.abs().nan_to_num().max())) if wide.numel() else 1.0
    limit = _TOLERANCE.get(expected.dtype, _COARSE) * scale
    return bool(torch.allclose(wide, other, rtol=0, atol=limit, equal_nan=True))


def _run(graph: Graph, ids: Tensor, positions: Tensor, weights: WeightCache) -> dict[Value, Tensor]:
    """Every value of the step, each token attending only to itself."""
    sizes = {"T": ids.shape[1]}
    values: dict[Value, Tensor] = dict(zip(graph.inputs, (ids, positions), strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            operands = [_operand(value, values, weights) for value in node.inputs]
            results = _evaluate(node, operands, sizes)
            values.update(zip(node.outputs, results, strict=True))
    return values


def _operand(
    value: Value | None, values: dict[Value, Tensor], weights: WeightCache
) -> Tensor | QuantTensor | None:
    if value is None:
        return None
    return weights.get(value) if value.is_weight else values[value]


def _evaluate(node: Node, operands: list[Any], sizes: dict[str, int]) -> list[Tensor]:
    if node.op == "attention":
        # A softmax over one key is 1, so each token gets its own value.
        q, _, v = operands[:3]
        return [v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)]
    attrs = {name: resolve(value, sizes) for name, value in node.attrs.items()}
    found = op_def(node.op).evaluate(*operands, **attrs)
    return list(found) if isinstance(found, tuple | list) else [found]
