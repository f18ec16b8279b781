"""Scales of the columns of a matrix, undone where its input is made: (x / s) (W s)^T = x W^T.

Quantised matrices lose less when the columns that are multiplied by large inputs are larger (AWQ,
Lin et al. 2023, arXiv:2306.00978), and rounded inputs lose less when no column sticks out
(SmoothQuant, Xiao et al. 2022, arXiv:2211.10438). A calibration chooses s; the division is part of
the weights region, so the step does not change: it goes into the weight of the norm, or into the
rows of the linear, that make x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.types import TensorType
from octavo.passes.base import Report, register_pass

_NORMS = ("rms_norm", "layer_norm")
_SUFFIX = ".input_scale"
_VIEWS = ("reshape", "split")


@dataclass(frozen=True)
class InputFold:
    """An input ``x [T, K]`` whose columns can be scaled, and the linears that read it.

    ``maker`` is the norm or the linear whose ``rows`` make x; ``repeats`` heads of ``head_dim``
    columns of x in a row are of one value head, so that their scales have to be equal.
    """

    x: Value
    linears: tuple[Node, ...]
    maker: Node
    rows: tuple[int, int]
    repeats: int = 1
    head_dim: int = 1

    @property
    def key(self) -> str:
        """What its scales are called where they are stored."""
        return self.x.name + _SUFFIX

    @property
    def maker_key(self) -> str:
        """What the factors of the maker are called."""
        return f"{self.x.name}.maker_scale"

    def tied(self, scales: Tensor) -> Tensor:
        """Scales ``[K]`` with those that have to be equal made their geometric mean."""
        heads = scales.log().view(-1, self.repeats, self.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).exp().flatten()

    def factors(self, scales: Tensor) -> Tensor:
        """By what the maker's weight, or its rows, are multiplied for tied scales."""
        size = self.maker.operand(1).shape[0]
        found = torch.ones(size, dtype=scales.dtype)
        start, stop = self.rows
        found[start:stop] = 1 / scales.view(-1, self.repeats, self.head_dim)[:, 0].flatten()
        return found


@register_pass("fold-input-scales")
def fold_input_scales(graph: Graph, report: Report) -> int:
    """Scale the inputs that the calibration names."""
    scaled = report.context.quantization.scaled
    found = [fold for fold in find_folds(graph) if fold.x.name in scaled]
    for fold in found:
        _fold(graph, fold)
    return len(found)


def find_folds(graph: Graph) -> Iterator[InputFold]:
    """The inputs that can be scaled and are not yet, in order, once each."""
    seen: dict[Value, None] = {}
    for linear in graph.find("linear"):
        x = linear.operand(0)
        if x in seen:
            continue
        seen[x] = None
        linears = tuple(node for node in graph.users(x))
        if x not in graph.outputs and all(_is_scalable(graph, node, x) for node in linears):
            fold = _made_by_norm(x, linears) or _made_by_linear(graph, x, linears)
            if fold is not None and not _is_scaled(fold):
                yield fold


def _is_scalable(graph: Graph, node: Node, x: Value) -> bool:
    """A linear by a constant matrix that no node but it reads."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return (
        node.op == "linear"
        and node.operand(0) is x
        and weight is not None
        and isinstance(weight.type, TensorType)
        and weight.is_weight
        and graph.users(weight) == [node]
    )


def _is_scaled(fold: InputFold) -> bool:
    pending = [fold.linears[0].operand(1)]
    while pending:
        node = pending.pop().producer
        if node is not None:
            if str(node.attrs.get("key", "")).endswith(_SUFFIX):
                return True
            pending += node.operands
    return False


def _made_by_norm(x: Value, linears: tuple[Node, ...]) -> InputFold | None:
    norm = x.producer
    if norm is None or norm.op not in _NORMS or len(norm.inputs) < 2 or norm.inputs[1] is None:
        return None
    weight = norm.operand(1)
    if not weight.is_weight or weight.tensor.rank != 1:
        return None
    return InputFold(x, linears, norm, (0, x.shape[-1]))


def _made_by_linear(graph: Graph, x: Value, linears: tuple[Node, ...]) -> InputFold | None:
    """x is the up projection times its gate, or what attention makes of the value projection."""
    node = x.producer
    if node is not None and node.op == "gated_activation":
        found = _rows(graph, node.operand(1))
        return found and InputFold(x, linears, *found)
    if node is not None and node.op == "reshape":
        node = graph.producer(node.operand(0), "paged_attention")
    if node is None or node.op != "paged_attention" or not _is_private(graph, node, x):
        return None
    write = graph.producer(node.operand(1), "kv_write")
    if write is None or write.attrs["slot"] != node.attrs["slot"]:
        return None
    found = _rows(graph, write.operand(2))
    if found is None:
        return None
    heads, value = node.output.shape[1], write.operand(2)
    return InputFold(x, linears, *found, heads // value.shape[1], value.shape[2])


def _is_private(graph: Graph, attention: Node, x: Value) -> bool:
    """Nothing but x reads the attention, and no other attention reads its slot."""
    slot = attention.attrs["slot"]
    readers = [node for node in graph.find("paged_attention") if node.attrs["slot"] == slot]
    return len(readers) == 1 and (
        attention.output is x or graph.sole_user(attention.output) is x.producer
    )


def _rows(graph: Graph, value: Value) -> tuple[Node, tuple[int, int]] | None:
    """The linear, and which of its rows, that make a value that has one reader."""
    start, size = 0, None
    while True:
        node = graph.producer(value, "linear", *_VIEWS)
        if node is None or graph.sole_user(value) is None:
            return None
        if node.op == "linear":
            break
        if node.op == "split":
            if size is not None or node.attrs["dim"] not in (-1, 1):
                return None
            place = node.outputs.index(value)
            sizes = node.attrs["sizes"]
            start, size = sum(sizes[:place]), sizes[place]
        value = node.operand(0)
    weight = node.operand(1)
    if not weight.is_weight or graph.users(weight) != [node]:
        return None
    return node, (start, start + (weight.shape[0] if size is None else size))


def _fold(graph: Graph, fold: InputFold) -> None:
    columns = fold.x.shape[-1]
    scale = graph.constant(
        "buffer", key=fold.key, type=TensorType("f32", (columns,)), name=fold.key
    )
    for linear in fold.linears:
        _set(graph, linear, 1, _scaled(graph, linear.operand(1), scale, 0.0))
    maker, rows = fold.maker, fold.maker.operand(1).shape[0]
    factor = graph.constant(
        "buffer", key=fold.maker_key, type=TensorType("f32", (rows,)), name=fold.maker_key
    )
    bias = maker.inputs[2] if maker.op != "rms_norm" and len(maker.inputs) > 2 else None
    if bias is not None:
        _set(graph, maker, 2, _scaled(graph, bias, factor, 0.0))
    if maker.op == "linear":
        factor = graph.constant("unsqueeze", factor, dim=1, name=f"{fold.maker_key}.column")
    offset = maker.attrs.get("weight_offset", 0.0)
    _set(graph, maker, 1, _scaled(graph, maker.operand(1), factor, offset))


def _set(graph: Graph, node: Node, index: int, value: Value) -> None:
    """Let a node read a weight made of another, which gives it its name."""
    old = node.operand(index)
    graph.set_inputs(node, [*node.inputs[:index], value, *node.inputs[index + 1 :]])
    value.origin = value.origin.merged(old.origin)
    name = old.name
    if all(user.is_weight for user in graph.users(old)):
        graph.rename(old, f"{name}.unscaled")
        graph.rename(value, name)


def _scaled(graph: Graph, weight: Value, factor: Value, offset: float) -> Value:
    """``(weight + offset) * factor - offset``, in f32, rounded once."""
    name, dtype = f"{weight.name}.scaled", weight.dtype
    wide = weight
    if dtype not in ("f32", "f64"):
        wide = graph.constant("cast", weight, dtype="f32", name=f"{weight.name}.wide")
    if offset:
        wide = graph.constant("add", wide, scalar=offset, name=f"{weight.name}.offset")
    result = graph.constant("mul", wide, factor, name=name)
    if offset:
        result = graph.constant("add", result, scalar=-offset, name=name)
    if result.dtype == dtype:
        return result
    return graph.constant("cast", result, dtype=dtype, name=name)
