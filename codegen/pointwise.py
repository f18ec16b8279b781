"""The text of the kernel of a ``pointwise`` node: loads, one line a call, the result.

A kernel keeps every float in f32, from the operands to the one rounding of its result; integers
and truth values stay what they are. templates/triton/pointwise.py.j2 puts these lines into place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.ir.ops.pointwise import FLOATS, REDUCTIONS, result_type, tile_shape
from octavo.ir.pointwise_expr import evaluate, parse_expression
from octavo.ir.types import Dim, SymDim, TensorType, dim_at

_TRITON = {"f32": "tl.float32", "i64": "tl.int64", "i32": "tl.int32", "bool": "tl.int1"}

# Texts by op; {0}, {1}... are the operands in the dtype of the result, others are attributes.
_ARITHMETIC = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "exp": "tl.exp({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "cos": "tl.cos({0})",
    "sin": "tl.sin({0})",
    "tanh": "tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "relu": "relu({0})",
    "silu": "silu({0})",
    "softcap": "softcap({0}, {cap})",
    "aten.abs.default": "tl.abs({0})",
    "aten.log.default": "tl.log({0})",
    "aten.log2.default": "tl.log2({0})",
    "aten.exp2.default": "tl.exp2({0})",
    "aten.erf.default": "tl.erf({0})",
    "aten.floor.default": "tl.floor({0})",
    "aten.ceil.default": "tl.ceil({0})",
    "aten.reciprocal.default": "1.0 / {0}",
    "aten.square.default": "{0} * {0}",
    "aten.softplus.default": "softplus({0}, {beta}, {threshold})",
    "aten.mish.default": "{0} * tanh(softplus({0}, 1.0, 20.0))",
    "aten.leaky_relu.default": "tl.where({0} < 0.0, {0} * {negative_slope}, {0})",
    "aten.elu.default": (
        "{scale} * tl.where({0} < 0.0, {alpha} * (tl.exp({0} * {input_scale}) - 1.0), {0})"
    ),
    "aten.maximum.default": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "aten.minimum.default": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "aten.logical_and.default": "{0} & {1}",
    "aten.logical_or.default": "{0} | {1}",
    "aten.logical_not.default": "{0} == 0",
    "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.bitwise_or.Tensor": "{0} | {1}",
    "aten.bitwise_not.default": "~{0}",
}
_DEFAULTS = {
    "beta": 1.0,
    "threshold": 20.0,
    "negative_slope": 0.01,
    "alpha": 1.0,
    "scale": 1.0,
    "input_scale": 1.0,
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_POWERS = {
    -1: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    1: "{0}",
    2: "{0} * {0}",
    3: "{0} * {0} * {0}",
    4: "{0} * {0} * {0} * {0}",
}
_REDUCED = {
    "aten.mean.dim": "tl.sum({0}, axis=1, keep_dims=True) / {width}",
    "aten.sum.dim_IntList": "tl.sum({0}, axis=1, keep_dims=True)",
    "aten.amax.default": "tl.max({0}, axis=1, keep_dims=True)",
    "aten.amin.default": "tl.min({0}, axis=1, keep_dims=True)",
}
# What stands beyond the end of a row that is reduced.
_BEYOND = {"aten.amax.default": 'float("-inf")', "aten.amin.default": 'float("inf")'}
# Functions of templates/triton/functions.j2, each with those that it calls before it.
_FUNCTIONS = {
    "tanh": ("tanh",),
    "relu": ("relu",),
    "silu": ("silu",),
    "sigmoid": ("sigmoid",),
    "softcap": ("tanh", "softcap"),
    "gelu": ("gelu",),
    "gelu_tanh": ("tanh", "gelu_tanh"),
    "softplus": ("softplus",),
    "aten.softplus.default": ("softplus",),
    "aten.mish.default": ("tanh", "softplus"),
}


@dataclass(frozen=True)
class Term:
    """A value of the kernel: its name there, its dtype there, its type in the graph."""

    text: str
    dtype: str
    type: TensorType


@dataclass(frozen=True)
class Operand:
    """An operand of the kernel. ``strides`` are pairs of a constant's name and its axis."""

    name: str
    dtype: str
    itemsize: int
    offset: str
    mask: str
    strides: tuple[tuple[str, int], ...]
    cast: str


@dataclass
class PointwiseKernel:
    """What the template inserts: names of functions, index lines, operands, lines, the result."""

    operands: tuple[Operand, ...]
    indices: tuple[str, ...]
    width: int
    out_width: int
    holds_rows: bool
    row_bytes: int
    functions: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    result: str = ""

    @property
    def num_operations(self) -> int:
        """Lines that compute, for each element."""
        return len(self.lines)


def pointwise_kernel(
    expr: str, operands: tuple[TensorType, ...], result: TensorType
) -> PointwiseKernel:
    """The parts of the kernel of an expression over operands of these types.

    Raises VerifyError for an expression whose values do not fit one tile of rows.
    """
    types: list[TensorType] = []
    expression = parse_expression(expr)

    def typed(op: str, arguments: list[TensorType], attrs: dict[str, Any]) -> TensorType:
        types.append(result_type(op, arguments, attrs))
        return types[-1]

    evaluate(expression, operands, typed)
    tile = tile_shape([*operands, *types])
    width, out_width = tile[-1], result.shape[-1]
    assert isinstance(width, int), "a tile has rows of a known width"
    assert isinstance(out_width, int), "a result has rows of a known width"
    kernel = PointwiseKernel(
        operands=tuple(_operand(index, each, tile) for index, each in enumerate(operands)),
        indices=_indices(tile),
        width=width,
        out_width=out_width,
        holds_rows=any(op in expr for op in REDUCTIONS),
        row_bytes=_row_bytes((*operands, result), tile),
    )
    values = [
        Term(operand.name, _kernel_dtype(each), each)
        for operand, each in zip(kernel.operands, operands, strict=True)
    ]
    kernel.result = evaluate(expression, values, _Lines(kernel).add).text
    return kernel


@dataclass
class _Lines:
    """Adds the lines of a kernel, one call after the other."""

    kernel: PointwiseKernel

    def add(self, op: str, arguments: list[Term], attrs: dict[str, Any]) -> Term:
        """The line of a call; returns the value that it makes."""
        made = result_type(op, [each.type for each in arguments], attrs)
        dtype = _kernel_dtype(made)
        text = _text(op, arguments, attrs, dtype, self.kernel.width)
        for name in _FUNCTIONS.get(_function(op, attrs), ()):
            if name not in self.kernel.functions:
                self.kernel.functions.append(name)
        name = f"v{len(self.kernel.lines)}"
        self.kernel.lines.append(f"{name} = {text}")
        return Term(name, dtype, made)


def _function(op: str, attrs: Mapping[str, Any]) -> str:
    """The key into _FUNCTIONS of what a call needs."""
    if op == "gated_activation":
        return str(attrs["activation"])
    if op == "gelu" and attrs.get("approximate") == "tanh":
        return "gelu_tanh"
    return op


def _text(op: str, arguments: list[Term], attrs: dict[str, Any], dtype: str, width: int) -> str:
    """The Triton expression of a call whose result is of a dtype."""
    if op == "cast":
        return _as(arguments[0], dtype)
    special = _SPECIAL.get(op)
    if special is not None:
        return special(arguments, attrs, dtype)
    name = op.split(".")[1] if op.startswith("aten.") else op
    if name in _COMPARISONS:
        return _comparison(_COMPARISONS[name], arguments, attrs)
    if op.startswith("aten.logical"):
        dtype = "bool"
    given = [_as(each, dtype) for each in arguments]
    if op in _REDUCED:
        inside = f"tl.where(cols < {width}, {given[0]}, {_BEYOND.get(op, '0.0')})"
        return _REDUCED[op].format(inside, width=width)
    if op == "pow":
        return _POWERS[attrs["scalar"]].format(*given)
    if attrs.get("scalar") is not None:
        given.append(_number(attrs["scalar"], dtype))
    numbers = {
        name: _number(value, dtype)
        for name, value in (_DEFAULTS | attrs).items()
        if isinstance(value, int | float)
    }
    return _ARITHMETIC[op].format(*given, **numbers)


def _gelu(arguments: list[Term], attrs: dict[str, Any], dtype: str) -> str:
    return f"{_function('gelu', attrs)}({_as(arguments[0], dtype)})"


def _gated(arguments: list[Term], attrs: dict[str, Any], dtype: str) -> str:
    gate, up = (_as(each, dtype) for each in arguments)
    return f"{attrs['activation']}({gate}) * {up}"


def _clamp(arguments: list[Term], attrs: dict[str, Any], dtype: str) -> str:
    # Not minimum and maximum, which drop a NaN.
    text = x = _as(arguments[0], dtype)
    if attrs.get("max") is not None:
        high = _number(attrs["max"], dtype)
        text = f"tl.where({x} > {high}, {high}, {text})"
    if attrs.get("min") is not None:
        low = _number(attrs["min"], dtype)
        # PyTorch clamps to the maximum last.
        bound = low
        if attrs.get("max") is not None and attrs["min"] > attrs["max"]:
            bound = _number(attrs["max"], dtype)
        text = f"tl.where({x} < {low}, {bound}, {text})"
    return text


def _where(arguments: list[Term], attrs: dict[str, Any], dtype: str) -> str:
    condition, x, y = arguments
    return f"tl.where({_as(condition, 'bool')}, {_as(x, dtype)}, {_as(y, dtype)})"


def _masked_fill(arguments: list[Term], attrs: dict[str, Any], dtype: str) -> str:
    x, mask = arguments
    return f"tl.where({_as(mask, 'bool')}, {_number(attrs['value'], dtype)}, {_as(x, dtype)})"


_SPECIAL: dict[str, Callable[[list[Term], dict[str, Any], str], str]] = {
    "gelu": _gelu,
    "gated_activation": _gated,
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp_max.default": _clamp,
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
}


def _comparison(sign: str, arguments: list[Term], attrs: dict[str, Any]) -> str:
    number = attrs.get("other")
    is_float = isinstance(number, float) or any(each.dtype == "f32" for each in arguments)
    dtype = "f32" if is_float else "i64"
    given = [_as(each, dtype) for each in arguments]
    return f"{given[0]} {sign} {given[1] if number is None else _number(number, dtype)}"


def _as(value: Term, dtype: str) -> str:
    """A value in a dtype of the kernel."""
    if value.dtype == dtype:
        return value.text
    return f"({value.text} != 0)" if dtype == "bool" else f"{value.text}.to({_TRITON[dtype]})"


def _number(value: float, dtype: str) -> str:
    """A Python number as a constant of a dtype of the kernel."""
    if dtype != "f32":
        return repr(value)
    return repr(float(value)) if math.isfinite(value) else f'float("{value}")'


def _kernel_dtype(tensor: TensorType) -> str:
    return "f32" if tensor.dtype in FLOATS else tensor.dtype


def _indices(tile: tuple[Dim, ...]) -> tuple[str, ...]:
    """Lines that split the number of a row into an index for each dim before the last."""
    if len(tile) == 2:
        return ("i0 = rows.to(tl.int64)",)
    lines = []
    rest = "rows"
    for axis in range(len(tile) - 2, 0, -1):
        lines.append(f"i{axis} = {rest} % {tile[axis]}")
        rest = f"({rest} // {tile[axis]})"
    return (*reversed(lines), f"i0 = {rest}.to(tl.int64)")


def _operand(index: int, tensor: TensorType, tile: tuple[Dim, ...]) -> Operand:
    """How an operand is loaded; along dims of size 1 it is the same for the whole tile."""
    name, missing = f"a{index}", len(tile) - tensor.rank
    spans = [axis for axis in range(tensor.rank) if tensor.shape[axis] != 1]
    strides = tuple((f"A{index}_{axis}", axis) for axis in spans)
    has_cols = bool(spans) and spans[-1] == tensor.rank - 1
    has_rows = len(spans) > has_cols
    terms = [
        f"{'cols' if axis == tensor.rank - 1 else f'i{axis + missing}'} * {stride}"
        for stride, axis in strides
    ]
    cols_mask = f"cols < {tile[-1]}"
    masks = {
        (True, True): ", mask=mask, other=0",
        (True, False): ", mask=rows < num_rows, other=0",
        (False, True): f", mask={cols_mask}, other=0",
        (False, False): "",
    }
    cast = ".to(tl.float32)" if tensor.dtype in FLOATS else ""
    offset = f" + {' + '.join(terms)}" if terms else ""
    return Operand(
        name,
        tensor.dtype,
        tensor.torch_dtype.itemsize,
        offset,
        masks[has_rows, has_cols],
        strides,
        cast,
    )


def _row_bytes(tensors: Iterable[TensorType], tile: tuple[Dim, ...]) -> int:
    """Bytes for each row of the tile; what all tokens share stays in the cache."""
    growing = [each for each in tensors if each.shape and isinstance(each.shape[0], SymDim)]
    sizes = {tile[0].symbol: 1} if isinstance(tile[0], SymDim) else {}
    num_rows = math.prod(dim_at(dim, sizes) for dim in tile[:-1])
    return sum(each.num_bytes(sizes) for each in growing) // num_rows
