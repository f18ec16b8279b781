"""Chains of ops that only rearrange, taken together.

A chain of transposes, permutes, squeezes and unsqueezes is known by two things: the order in which
the result has the base's dims (those that are not 1), and the result's shape. Whatever gives the
same two with fewer ops may stand in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.types import Dim


@dataclass(frozen=True)
class Chain:
    """``order`` lists the base's dims other than 1 as the result has them; ``length`` in ops."""

    base: Value
    order: tuple[int, ...]
    shape: tuple[Dim, ...]
    length: int

    @property
    def is_sorted(self) -> bool:
        """True when only unit dims come and go."""
        return list(self.order) == sorted(self.order)


def chain_of(value: Value) -> Chain:
    """The longest chain that ends in a value; of length 0 when it is not made by a view."""
    base, length = value, 0
    places: list[int | None] = list(range(value.tensor.rank))
    while base.producer is not None:
        step = sources(base.producer)
        if step is None:
            break
        places = [None if place is None else step[place] for place in places]
        base, length = base.producer.operand(0), length + 1
    order = tuple(place for place in places if place is not None and base.shape[place] != 1)
    return Chain(base, order, value.shape, length)


def shorten(graph: Graph, node: Node) -> Value | None:
    """A value equal to the node's result by fewer views, or None when there is none."""
    chain = chain_of(node.output)
    if chain.length == 0:
        return None
    if chain.is_sorted and chain.shape == chain.base.shape:
        return chain.base
    if chain.length == 1:
        return None
    if chain.is_sorted:
        return with_units(graph, node, chain.base, chain.shape)
    units = [dim for dim, size in enumerate(chain.base.shape) if size == 1]
    if len(chain.shape) == chain.base.tensor.rank:
        order, rest = iter(chain.order), iter(units)
        dims = [next(rest) if size == 1 else next(order) for size in chain.shape]
        return _permuted(graph, node, chain.base, dims)
    if chain.length == 2:
        return None
    permuted = _permuted(graph, node, chain.base, [*units, *chain.order])
    return with_units(graph, node, permuted, chain.shape)


def with_units(graph: Graph, anchor: Node, value: Value, shape: tuple[Dim, ...]) -> Value:
    """The value with unit dims added or dropped to have this shape, by the plainest one op."""
    if value.shape == shape:
        return value
    if (dim := _extra_unit(shape, value.shape)) is not None:
        return graph.insert_before(anchor, "unsqueeze", value, dim=dim).output
    if (dim := _extra_unit(value.shape, shape)) is not None:
        return graph.insert_before(anchor, "squeeze", value, dim=dim).output
    return graph.insert_before(anchor, "reshape", value, shape=shape).output


def _extra_unit(long: tuple[Dim, ...], short: tuple[Dim, ...]) -> int | None:
    if len(long) != len(short) + 1:
        return None
    fits = (d for d, size in enumerate(long) if size == 1 and long[:d] + long[d + 1 :] == short)
    return next(fits, None)


def _permuted(graph: Graph, anchor: Node, value: Value, dims: Sequence[int]) -> Value:
    moved = [dim for dim, source in enumerate(dims) if dim != source]
    if not moved:
        return value
    if len(moved) == 2:
        dim0, dim1 = moved
        return graph.insert_before(anchor, "transpose", value, dim0=dim0, dim1=dim1).output
    return graph.insert_before(anchor, "permute", value, dims=tuple(dims)).output


def sources(node: Node) -> list[int | None] | None:
    """For each dim of the result the dim of the operand, None for a new unit; None for no view."""
    if node.op not in ("transpose", "permute", "unsqueeze", "squeeze", "reshape"):
        return None
    shape = node.operand(0).shape
    dims: list[int | None] = list(range(len(shape)))
    if node.op == "transpose":
        dim0, dim1 = node.attrs["dim0"], node.attrs["dim1"]
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    elif node.op == "permute":
        dims = [dim % len(shape) for dim in node.attrs["dims"]]
    elif node.op == "unsqueeze":
        dims.insert(node.attrs["dim"] % (len(shape) + 1), None)
    elif node.op == "squeeze":
        del dims[node.attrs["dim"]]
    else:
        return _reshape_sources(shape, node.output.shape)
    return dims


def _reshape_sources(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> list[int | None] | None:
    """A reshape is a view of this kind when only unit dims come and go."""
    kept = [dim for dim, size in enumerate(old) if size != 1]
    if [old[dim] for dim in kept] != [size for size in new if size != 1]:
        return None
    rest = iter(kept)
    return [None if size == 1 else next(rest) for size in new]
