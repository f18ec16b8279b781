"""Which elements of the last dim a value takes, seen through slices, splits and selects."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ir.graph import Node, Value


@dataclass(frozen=True)
class Piece:
    """Elements ``start, start + step, ...``, ``count`` of them, of the last dim of ``base``."""

    base: Value
    start: int
    step: int
    count: int

    @property
    def is_whole(self) -> bool:
        """True when nothing is left out."""
        return self.start == 0 and self.step == 1 and self.count == self.base.shape[-1]

    def joined(self, other: Piece) -> Piece | None:
        """The run that starts with this piece and goes on with the other; None when it does not."""
        follows = other.start == self.start + self.count and self.step == other.step == 1
        if self.base is not other.base or not follows:
            return None
        return Piece(self.base, self.start, 1, self.count + other.count)

    def interleaved(self, other: Piece) -> Piece | None:
        """The run whose even members this piece holds and whose odd ones the other holds."""
        alternate = other.start == self.start + 1 and self.step == other.step == 2
        if self.base is not other.base or not alternate or self.count != other.count:
            return None
        return Piece(self.base, self.start, 1, 2 * self.count)


def piece_of(value: Value) -> Piece:
    """The piece of the deepest value below; the whole of ``value`` itself where nothing cuts."""
    node = value.producer
    cut = _cut(node, value) if node is not None else None
    if node is None or cut is None:
        return Piece(value, 0, 1, value.shape[-1])
    below = piece_of(_source(node))
    return Piece(below.base, below.start + below.step * cut.start, below.step * cut.step, len(cut))


def _source(node: Node) -> Value:
    """What a node cuts: a select takes from the pairs that a reshape made."""
    x = node.operand(0)
    return x.producer.operand(0) if node.op == "select" and x.producer is not None else x


def _cut(node: Node, value: Value) -> range | None:
    """The indices that a node takes of the last dim of what it cuts, or None for no cut."""
    if node.op not in ("slice", "split", "select"):
        return None
    x, last = node.operand(0), node.operand(0).tensor.rank - 1
    if node.attrs["dim"] not in (-1, last):
        return None
    if node.op == "slice":
        bounds = slice(node.attrs["start"], node.attrs["end"], node.attrs["step"])
        return range(*bounds.indices(x.shape[-1]))
    if node.op == "split":
        index = node.outputs.index(value)
        start = sum(node.attrs["sizes"][:index])
        return range(start, start + node.attrs["sizes"][index])
    return _pick(x, node.attrs["index"])


def _pick(x: Value, index: int) -> range | None:
    """The indices of one member of each pair, where a reshape has cut the last dim into pairs."""
    reshape = x.producer
    if reshape is None or reshape.op != "reshape" or x.shape[-1] != 2:
        return None
    whole = reshape.operand(0).shape
    return range(index % 2, whole[-1], 2) if whole[:-1] == x.shape[:-2] else None
