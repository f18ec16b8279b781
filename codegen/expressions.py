"""Lines of the program that are one PyTorch call: everything that has no template of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.codegen.kernels import BINARY, COPY, UNARY
from octavo.codegen.lower import Line
from octavo.ir.ops.aten import OperandRef, _overload
from octavo.ir.types import DTYPES, SymDim, TensorType

_UNARY = {
    "relu": "torch.clamp_min({x}, 0, out={out})",
    "silu": "torch.ops.aten.silu.out({x}, out={out})",
}


def dim_text(dim: int | SymDim, prefix: str = "b.") -> str:
    """A dimension as Python: ``576``, ``b.T``, ``4 * b.T``."""
    if isinstance(dim, int):
        return str(dim)
    text = prefix + dim.symbol
    if dim.scale != 1:
        text = f"{dim.scale} * {text}"
    return text if not dim.offset else f"{text} {'+' if dim.offset > 0 else '-'} {abs(dim.offset)}"


def tuple_text(items: Sequence[str]) -> str:
    """A tuple display."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def shape_text(tensor: TensorType, prefix: str = "b.") -> str:
    """The shape of a type as a tuple display."""
    return tuple_text([dim_text(dim, prefix) for dim in tensor.shape])


def dtype_text(dtype: str) -> str:
    """A dtype of the IR as PyTorch's: ``torch.bfloat16``."""
    return str(DTYPES[dtype])


def value_text(value: Any, prefix: str = "b.") -> str:
    """An attribute as Python."""
    if isinstance(value, SymDim):
        return dim_text(value, prefix)
    if isinstance(value, tuple):
        return tuple_text([value_text(item, prefix) for item in value])
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def view_text(line: Line, x: str, prefix: str = "b.", *, is_viewable: bool = False) -> str:
    """A view of ``x``; ``is_viewable``: its strides allow the reshape."""
    at = {name: value_text(value, prefix) for name, value in line.attrs.items()}
    match line.op:
        case "reshape":
            return f"{x}.{'view' if is_viewable else 'reshape'}{at['shape']}"
        case "expand":
            return f"{x}.expand({at['shape']})"
        case "transpose":
            return f"{x}.transpose({at['dim0']}, {at['dim1']})"
        case "permute":
            return f"{x}.permute({at['dims']})"
        case "unsqueeze" | "squeeze":
            return f"{x}.{line.op}({at['dim']})"
        case "select":
            return f"{x}.select({at['dim']}, {at['index']})"
        case "slice":
            given = ", ".join(at[name] for name in ("dim", "start", "end", "step"))
            return f"torch.ops.aten.slice.Tensor({x}, {given})"
        case "split":
            return f"torch.split({x}, {at['sizes']}, {at['dim']})"
    raise AssertionError(f"{line.op} is no view")


def call_text(line: Line, operands: Sequence[str], out: str) -> str:
    """The call that writes a line's result into ``out``."""
    if line.op in UNARY:
        return _unary_text(line, operands[0], out)
    if line.op in BINARY:
        second = operands[1] if len(operands) > 1 else value_text(line.attrs["scalar"])
        return f"torch.{line.op}({operands[0]}, {second}, out={out})"
    match line.op:
        case "cast":
            return f"{out}.copy_({operands[0]})"
        case "matmul":
            return f"torch.matmul({operands[0]}, {operands[1]}, out={out})"
        case "concat":
            return f"torch.cat({tuple_text(operands)}, {line.attrs['dim']}, out={out})"
        case "gather_rows":
            return f"torch.index_select({operands[0]}, 0, {operands[1]}, out={out})"
        case "gather_columns":
            return f"torch.index_select({operands[0]}, -1, {operands[1]}, out={out})"
        case "embedding":
            return _embedding_text(line, operands, out)
    assert line.op == COPY, f"{line.op} has neither a template nor an expression"
    return f"{out}.view({operands[0]}.shape).copy_({operands[0]})"


def _unary_text(line: Line, x: str, out: str) -> str:
    if line.op in _UNARY:
        return _UNARY[line.op].format(x=x, out=out)
    if line.op == "gelu":
        approximate = value_text(line.attrs["approximate"])
        return f"torch.ops.aten.gelu.out({x}, approximate={approximate}, out={out})"
    return f"torch.{line.op}({x}, out={out})"


def _embedding_text(line: Line, operands: Sequence[str], out: str) -> str:
    ids, weight = operands
    rank = line.operand(0).tensor.rank
    if rank == 1:
        return f"torch.index_select({weight}, 0, {ids}, out={out})"
    return f"{out}.copy_(F.embedding({ids}, {weight}))"


def aten_text(line: Line, operands: Sequence[str | None]) -> str:
    """The call of an op that is left to PyTorch."""
    schema = _overload(line.op)._schema
    taken = {ref.index for ref in _references(tuple(line.attrs.values()))}
    free = iter([text for index, text in enumerate(operands) if index not in taken])
    positional: list[str] = []
    keywords: list[str] = []
    is_gapless = True
    for argument in schema.arguments:
        text = _argument_text(argument, line.attrs, operands, free)
        if text is None:
            is_gapless = False
        elif is_gapless and not argument.kwarg_only:
            positional.append(text)
        else:
            keywords.append(f"{argument.name}={text}")
    _, name, *overload = line.op.split(".")
    target = f"torch.ops.aten.{name}.{overload[0] if overload else 'default'}"
    return f"{target}({', '.join([*positional, *keywords])})"


def _argument_text(
    argument: Any, attrs: Mapping[str, Any], operands: Sequence[str | None], free: Any
) -> str | None:
    """The text of one argument of an aten call, None when it is left at its default."""
    if argument.name not in attrs:
        return next(free, None) if "Tensor" in str(argument.type) else None
    value = attrs[argument.name]
    if argument.name == "dtype" and isinstance(value, str):
        return dtype_text(value)
    return _referring_text(value, operands)


def _referring_text(value: Any, operands: Sequence[str | None]) -> str:
    if isinstance(value, OperandRef):
        return str(operands[value.index])
    if isinstance(value, tuple):
        return f"[{', '.join(_referring_text(item, operands) for item in value)}]"
    return value_text(value)


def _references(value: Any) -> list[OperandRef]:
    if isinstance(value, OperandRef):
        return [value]
    if isinstance(value, tuple):
        return [ref for item in value for ref in _references(item)]
    return []
