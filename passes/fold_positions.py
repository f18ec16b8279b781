"""What depends on nothing but positions becomes a table, looked up by position.

All variants of rotary embedding fold this way, exactly and with no code for any of them: the nodes
that compute a value run once, in the weights region, for all positions there are.
"""

from __future__ import annotations

import math

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.ops import resolve
from octavo.ir.types import SymDim
from octavo.passes.base import Report, register_pass
from octavo.passes.match import strip
from octavo.passes.traits import VIEWS, is_elementwise, is_pure

MAX_TABLE_BYTES = 256 << 20

_T = SymDim("T")
_BY_ROW = ("matmul", "transpose", "permute", "expand", "unsqueeze", "squeeze", "aten.stack.default")
# These too, as long as their dim is not T.
_ALONG_DIM = (
    "slice",
    "select",
    "split",
    "concat",
    "aten.mean.dim",
    "aten.repeat_interleave.self_int",
    "aten.sum.dim_IntList",
)


@register_pass("fold-positions")
def fold_positions(graph: Graph, report: Report) -> int:
    """Look each value up that positions alone decide and that something else reads."""
    positions = next((value for value in graph.inputs if value.name == "positions"), None)
    if positions is None or positions.shape != (_T,):
        return 0
    rows = _rows(graph, positions, report)
    tables = _Tables(graph, positions, report.context.max_position)
    return sum([_fold(value, tables, report) for value in _frontier(graph, rows)])


def _rows(graph: Graph, positions: Value, report: Report) -> dict[Value, None]:
    """The values whose row at each token depends on its position alone, positions included."""
    rows: dict[Value, None] = {positions: None}
    for node in graph.nodes:
        steps = [value for value in node.operands if not value.is_weight]
        if not steps or not all(value in rows for value in steps):
            continue
        if not all(_is_by_token(value) for value in node.outputs):
            report.missed(node, f"{node.op} leaves more or less than one dim of tokens")
        elif not _maps_rows(node):
            report.missed(node, f"{node.op} may mix the positions of several tokens")
        else:
            rows.update(dict.fromkeys(node.outputs))
    return rows


def _is_by_token(value: Value) -> bool:
    symbolic = [dim for dim in value.shape if isinstance(dim, SymDim)]
    return symbolic == [_T]


def _maps_rows(node: Node) -> bool:
    """True when a row of the result needs just that row of the operands.

    Each value here has one dim of tokens, which leaves little to check: an element-wise op can only
    align them, and a product that summed over them would have none left.
    """
    if node.op in _BY_ROW or is_elementwise(node.op):
        return is_pure(node)
    if node.op in ("embedding", "gather_rows"):
        return node.operands[0].is_weight is (node.op == "gather_rows")
    if node.op == "reshape":
        return _num_before(node.operand(0)) == _num_before(node.output)
    return node.op in _ALONG_DIM and not _is_along_tokens(node)


def _num_before(value: Value) -> int:
    """The product of the dims before the tokens'."""
    return math.prod(value.shape[: value.shape.index(_T)])


def _is_along_tokens(node: Node) -> bool:
    x = next(value for value in node.operands if not value.is_weight)
    dims = node.attrs.get("dim")
    if dims is None:  # all of them
        return True
    listed = dims if isinstance(dims, tuple) else (dims,)
    return x.shape.index(_T) in [dim % x.tensor.rank for dim in listed]


def _frontier(graph: Graph, rows: dict[Value, None]) -> list[Value]:
    """The values of ``rows`` that others read, below the views on top of them."""
    found: dict[Value, None] = {}
    for value in rows:
        users = graph.users(value)
        if value in graph.outputs or any(out not in rows for u in users for out in u.outputs):
            while value.producer is not None and value.producer.op in VIEWS:
                value = value.producer.operand(0)
            if value in rows:
                found[value] = None
    return list(found)


def _fold(value: Value, tables: _Tables, report: Report) -> bool:
    if _is_lookup(value, tables.positions):
        return False
    num_bytes = value.tensor.num_bytes({"T": tables.num_rows})
    if num_bytes > MAX_TABLE_BYTES:
        return report.missed(
            value, f"its table would take {num_bytes >> 20} MiB, more than {MAX_TABLE_BYTES >> 20}"
        )
    tables.look_up(value)
    return True


def _is_lookup(value: Value, positions: Value) -> bool:
    """True for positions in another dtype, and for a row of a weight as it is."""
    if strip(value, "cast", *VIEWS) is positions:
        return True
    node = value.producer
    if node is None or node.op != "embedding":
        return False
    return strip(node.operand(0), *VIEWS) is positions


class _Tables:
    """Makes tables: values computed for all positions at once, in the weights region."""

    def __init__(self, graph: Graph, positions: Value, num_rows: int) -> None:
        self.graph = graph
        self.positions = positions
        self.num_rows = num_rows
        self.computed: dict[Value, Value] = {}

    def look_up(self, value: Value) -> None:
        """Replace a value by rows of its table ``[num_rows, D]``."""
        axis = value.shape.index(_T)
        rest = [dim for dim in value.shape if dim != _T]
        table = self._rows_first(self._compute(value), axis)
        anchor = value.producer
        assert anchor is not None
        new = self.graph.insert_before(anchor, "embedding", self.positions, table).output
        if len(rest) != 1:
            new = self.graph.insert_before(anchor, "reshape", new, shape=(_T, *rest)).output
        if axis:
            dims = (*range(1, axis + 1), 0, *range(axis + 1, len(rest) + 1))
            new = self.graph.insert_before(anchor, "permute", new, dims=dims).output
        new.origin = value.origin
        self.graph.replace_all(value, new)

    def _rows_first(self, table: Value, axis: int) -> Value:
        options = {"name": table.name, "origin": table.origin}
        if axis:
            dims = (axis, *(dim for dim in range(table.tensor.rank) if dim != axis))
            table = self.graph.constant("permute", table, dims=dims, **options)
        if table.tensor.rank != 2:
            width = math.prod(table.shape[1:])
            shape = (self.num_rows, width)
            table = self.graph.constant("reshape", table, shape=shape, **options)
        return table

    def _compute(self, value: Value) -> Value:
        """The weight that holds a value for all positions in order."""
        if value.is_weight:
            return value
        if value not in self.computed:
            if value is self.positions:
                self._add([value], "iota", n=self.num_rows)
            else:
                assert value.producer is not None
                self._copy(value.producer)
        return self.computed[value]

    def _copy(self, node: Node) -> None:
        inputs = [operand and self._compute(operand) for operand in node.inputs]
        sizes = {"T": self.num_rows}
        attrs = {name: resolve(attr, sizes) for name, attr in node.attrs.items()}
        self._add(node.outputs, node.op, *inputs, **attrs)

    def _add(self, values: list[Value], op: str, /, *inputs: Value | None, **attrs: object) -> None:
        names, origin = [value.name for value in values], values[0].origin
        made = self.graph.append_weight(op, *inputs, name=names, origin=origin, **attrs)
        self.computed.update(zip(values, made.outputs, strict=True))
