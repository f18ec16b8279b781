"""What an op's attributes become when its operands lose their leading dim of 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.ir.graph import Node
from octavo.passes.traits import is_elementwise

Attrs = dict[str, Any]

# Each row of the last dims on its own: nothing speaks of the leading dim.
_UNTOUCHED = frozenset(
    {"linear", "matmul", "embedding", "rms_norm", "layer_norm", "gather_columns"}
)
# Only their ``dim`` does; after it the rank that it counts in, over the operand's.
_ALONG_DIM: dict[str, int] = {
    "squeeze": 0,
    "unsqueeze": 1,
    "slice": 0,
    "select": 0,
    "split": 0,
    "concat": 0,
    "aten.amax.default": 0,
    "aten.amin.default": 0,
    "aten.argmax.default": 0,
    "aten.cumsum.default": 0,
    "aten.flip.default": 0,
    "aten.log_softmax.int": 0,
    "aten.max.dim": 0,
    "aten.mean.dim": 0,
    "aten.repeat_interleave.self_int": 0,
    "aten.softmax.int": 0,
    "aten._softmax.default": 0,
    "aten.stack.default": 1,
    "aten.sum.dim_IntList": 0,
    "aten.topk.default": 0,
    "aten.var.correction": 0,
}


def narrowed_attrs(node: Node) -> Attrs | None:
    """The attributes without the leading dim, or None when no rule is known."""
    if node.op in _UNTOUCHED or is_elementwise(node.op):
        return node.attrs
    if node.op in _SPECIAL:
        return _SPECIAL[node.op](node)
    if node.op in _ALONG_DIM:
        rank = node.operand(0).tensor.rank + _ALONG_DIM[node.op]
        return _moved(node, rank, "dims" if node.op == "aten.flip.default" else "dim")
    return None


def is_on_batch(node: Node) -> bool:
    """True for a view of the leading dim itself, which only drops, repeats or restates it."""
    if node.op not in ("squeeze", "unsqueeze", "select", "slice"):
        return False
    return bool(node.attrs["dim"] % (node.operand(0).tensor.rank + (node.op == "unsqueeze")) == 0)


def _moved(node: Node, rank: int, *names: str) -> Attrs | None:
    attrs = dict(node.attrs)
    for name in names:
        dims = attrs.get(name)
        listed = dims if isinstance(dims, tuple) else (dims,)
        if any(dim is None or dim % rank == 0 for dim in listed):
            return None
        moved = tuple(dim - 1 if dim > 0 else dim for dim in listed)
        attrs[name] = moved if isinstance(dims, tuple) else moved[0]
    return attrs


def _transpose(node: Node) -> Attrs | None:
    return _moved(node, node.operand(0).tensor.rank, "dim0", "dim1")


def _permute(node: Node) -> Attrs | None:
    dims = [dim % node.operand(0).tensor.rank for dim in node.attrs["dims"]]
    return {"dims": tuple(dim - 1 for dim in dims[1:])} if dims[0] == 0 else None


def _shaped(node: Node) -> Attrs:
    """A shape that begins with 1 keeps the dim; any other has taken it in."""
    shape = node.attrs["shape"]
    return {"shape": shape[1:]} if len(shape) > 1 and shape[0] == 1 else node.attrs


_SPECIAL: dict[str, Callable[[Node], Attrs | None]] = {
    "transpose": _transpose,
    "permute": _permute,
    "reshape": _shaped,
    "expand": _shaped,
}
