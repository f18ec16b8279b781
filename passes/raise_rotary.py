"""raise-rotary: rotary position embeddings spelled out become ``rotary``.

A trace computes ``x * cos + rotate(x) * sin`` on ``[heads, T, D]``, or on the first dims of a head
only, in either pairing. The op wants ``[T, heads, D]``; the transposes put around it cancel with
those that the model made to come to its own layout. The op computes in f32, where some models round
each product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass
from octavo.passes.match import strip
from octavo.passes.pieces import Piece, piece_of
from octavo.passes.widening import before_widening

_VIEWS = ("reshape", "unsqueeze", "squeeze", "expand")
_CUTS = ("transpose", "slice", "split", "select", "cast")


@dataclass(frozen=True)
class _Rotation:
    """``out`` is the rotated ``x``: the whole heads, or their first dims where ``x`` is a piece."""

    x: Value
    cos: Value
    sin: Value
    out: Value
    interleaved: bool


@register_pass("raise-rotary")
def raise_rotary(graph: Graph, report: Report) -> int:
    """Raise each rotation, and take in the casts around it and the dims that pass through."""
    count = sum(_raise(graph, node, report) for node in graph.find("add"))
    graph.sweep()
    for node in graph.find("neg"):
        users = graph.users(node.output)
        if any(user.op in ("concat", "unsqueeze", "aten.stack.default") for user in users):
            report.missed(node, "what it turns is not used as x * cos + rotate(x) * sin")
    return count


def _raise(graph: Graph, add: Node, report: Report) -> bool:
    found = _find(graph, add)
    if found is None:
        return False
    axis = _token_axis(found.cos, found.x)
    if axis is None or axis != _token_axis(found.sin, found.x):
        return report.missed(add, f"its tables {found.cos.type} are not one angle for each token")
    if not _is_tokens_and_heads(found.x, axis):
        return report.missed(add, f"its {found.x.type} is not laid out in tokens and heads")
    _replace(graph, _take_surroundings(graph, found), axis)
    return True


# Finding


def _find(graph: Graph, add: Node) -> _Rotation | None:
    """The rotation that an add ends: ``x * cos + rotate(x) * sin`` in any order."""
    for straight, turned in _orders(add):
        for (x, cos), (rotated, sin) in _products(graph, straight, turned):
            # Some widen x once, some widen it and what they turned apart (Ernie 4.5).
            turn = _turn(before_widening(rotated))
            for whole in (x, before_widening(x)):
                if turn is not None and turn[0] == piece_of(whole):
                    return _Rotation(whole, cos, sin, add.output, interleaved=turn[1])
    return None


def _orders(node: Node | None) -> Iterator[tuple[Value, Value]]:
    """Both orders of the operands of an add or a mul."""
    if node is not None and len(node.operands) == 2:
        yield node.operand(0), node.operand(1)
        yield node.operand(1), node.operand(0)


def _products(
    graph: Graph, one: Value, other: Value
) -> Iterator[tuple[tuple[Value, Value], tuple[Value, Value]]]:
    for first in _orders(graph.producer(one, "mul")):
        for second in _orders(graph.producer(other, "mul")):
            yield first, second


def _turn(value: Value) -> tuple[Piece, bool] | None:
    """What a value is the ``rotate`` of, and whether pairs are neighbours."""
    node = value.producer
    if node is None:
        return None
    if node.op == "concat" and _is_last(node):
        return _half_turn(node)
    if node.op == "reshape" and node.operand(0).producer is not None:
        stack = node.operand(0).producer
        if stack is not None and node.operand(0).shape[:-2] == value.shape[:-1]:
            return _interleaved_turn(stack)
    return None


def _is_last(node: Node) -> bool:
    return len(node.operands) == 2 and node.attrs["dim"] in (-1, node.output.tensor.rank - 1)


def _half_turn(concat: Node) -> tuple[Piece, bool] | None:
    back, front = _negated(concat.operand(0)), piece_of(concat.operand(1))
    if back is None or back.count != front.count:
        return None
    whole = front.joined(back)
    return (whole, False) if whole else None


def _interleaved_turn(stack: Node) -> tuple[Piece, bool] | None:
    if stack.op not in ("concat", "aten.stack.default") or not _is_last(stack):
        return None
    members = [_without_unit_dim(member, stack) for member in stack.operands]
    odd, even = _negated(members[0]), piece_of(members[1])
    whole = even.interleaved(odd) if odd is not None else None
    return (whole, True) if whole else None


def _without_unit_dim(member: Value, stack: Node) -> Value:
    """A member of a stack; where the stack is a concat, the value below its dim of 1."""
    node = member.producer
    is_view = node is not None and node.op in ("unsqueeze", "reshape")
    if stack.op != "concat" or node is None or not is_view:
        return member
    return node.operand(0) if member.shape == (*node.operand(0).shape, 1) else member


def _negated(value: Value) -> Piece | None:
    node = value.producer
    return piece_of(node.operand(0)) if node is not None and node.op == "neg" else None


def _token_axis(table: Value, x: Value) -> int | None:
    """The axis of ``x`` that a table's rows lie along; None if it is no ``[T, D_rot]``."""
    shape = (1,) * (x.tensor.rank - table.tensor.rank) + table.shape
    axes = [axis for axis, dim in enumerate(shape[:-1]) if dim != 1]
    fits = len(axes) == 1 and shape[axes[0]] == x.shape[axes[0]] and shape[-1] == x.shape[-1]
    return axes[0] if fits and len(shape) == x.tensor.rank else None


def _is_tokens_and_heads(x: Value, axis: int) -> bool:
    """True for ``[T, D]``, ``[T, heads, D]`` and ``[heads, T, D]``, the latter in batches of 1."""
    batch = x.shape[: max(x.tensor.rank - 3, 0)]
    return batch in ((), (1,)) and axis >= len(batch)


# Taking in what stands around


def _take_surroundings(graph: Graph, found: _Rotation) -> _Rotation:
    """Take in casts to f32 and back, and the dims that pass through, whichever comes first."""
    return _take_cast(graph, _take_rest(graph, _take_cast(graph, found)))


def _take_cast(graph: Graph, found: _Rotation) -> _Rotation:
    back = graph.sole_user(found.out)
    if back is None or back.op != "cast":
        return found
    narrow = before_widening(found.x)
    if found.out.dtype != found.x.dtype and back.output.dtype == found.x.dtype:
        return replace(found, out=back.output)
    if narrow is not found.x and back.output.dtype == narrow.dtype:
        return replace(found, x=narrow, out=back.output)
    return found


def _take_rest(graph: Graph, found: _Rotation) -> _Rotation:
    concat = graph.sole_user(found.out)
    if concat is None or concat.op != "concat" or not _is_last(concat):
        return found
    if concat.operand(0) is not found.out:
        return found
    out = concat.output
    if found.out.dtype != found.x.dtype:
        # Joined with what is wide, the rest was widened; the cast back undoes that (CodeGen).
        back = graph.sole_user(out)
        if back is None or back.op != "cast" or back.output.dtype != found.x.dtype:
            return found
        out = back.output
    whole = piece_of(found.x).joined(piece_of(concat.operand(1)))
    if whole is None:
        return found
    return replace(found, x=_value_of(graph, concat, found.x, whole), out=out)


def _value_of(graph: Graph, anchor: Node, part: Value, whole: Piece) -> Value:
    """The value that holds a piece: one that the part was cut from, or a new slice."""
    value = part
    while value is not whole.base:
        if piece_of(value) == whole:
            return value
        assert value.producer is not None
        value = value.producer.operand(0)
    if whole.is_whole:
        return value
    cut = {"dim": value.tensor.rank - 1, "start": whole.start, "end": whole.start + whole.count}
    return graph.insert_before(anchor, "slice", value, **cut, name=value.name).output


# Writing


def _replace(graph: Graph, found: _Rotation, axis: int) -> None:
    anchor = found.out.producer
    assert anchor is not None
    x = found.x
    if x.dtype != found.out.dtype:
        x = graph.insert_before(anchor, "cast", x, dtype=found.out.dtype).output
    shape = (found.out.shape[axis], found.cos.shape[-1])
    cos, sin = (_rows(graph, anchor, table, shape) for table in (found.cos, found.sin))
    x = _tokens_first(graph, anchor, x, axis)
    # After what it turns (q_proj, k_norm): the add of the trace says nothing.
    name = f"{strip(x, *_VIEWS, *_CUTS).name}.rotary"
    rotated = graph.insert_before(
        anchor, "rotary", x, cos, sin, interleaved=found.interleaved, name=name
    ).output
    graph.replace_all(found.out, _as_before(graph, anchor, rotated, axis))


def _rows(graph: Graph, anchor: Node, table: Value, shape: tuple[object, ...]) -> Value:
    """The table as ``[T, D_rot]``: the look-up itself if only views lie between."""
    value = table
    while value.shape != shape and value.producer is not None and value.producer.op in _VIEWS:
        value = value.producer.operand(0)
    if value.shape == shape:
        return value
    return graph.insert_before(anchor, "reshape", table, shape=shape, name=table.name).output


def _tokens_first(graph: Graph, anchor: Node, x: Value, axis: int) -> Value:
    """``[T, heads, D]`` of an x of rank 2 to 4, with the tokens along an axis."""
    named = {"name": x.name, "origin": x.origin}
    rank = x.tensor.rank
    if rank == 2:
        return graph.insert_before(anchor, "unsqueeze", x, dim=1, **named).output
    if rank == 4:
        x = graph.insert_before(anchor, "squeeze", x, dim=0, **named).output
    if axis == rank - 3:
        return x
    made = graph.producer(x, "transpose")
    if made is not None and {made.attrs["dim0"] % 3, made.attrs["dim1"] % 3} == {0, 1}:
        return made.operand(0)
    return graph.insert_before(anchor, "transpose", x, dim0=0, dim1=1, **named).output


def _as_before(graph: Graph, anchor: Node, rotated: Value, axis: int) -> Value:
    """The layout that came in, of a ``[T, heads, D]`` that goes out."""
    rank = anchor.output.tensor.rank
    if rank == 2:
        return graph.insert_before(anchor, "squeeze", rotated, dim=1).output
    if axis != rank - 3:
        rotated = graph.insert_before(anchor, "transpose", rotated, dim0=0, dim1=1).output
    if rank == 4:
        rotated = graph.insert_before(anchor, "unsqueeze", rotated, dim=0).output
    return rotated
