"""A group of element-wise ops that one kernel runs, and which ops that can be.

The reference evaluation rounds after each op, as the ops of the group do by themselves. A kernel
keeps every float between operands and result in f32 and rounds once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.elementwise import broadcast
from octavo.ir.ops.registry import infer_types, op, op_def
from octavo.ir.pointwise_expr import evaluate, parse_expression
from octavo.ir.types import SymDim, TensorType, tensor_type

# Ops of the registry and of PyTorch, by name, that kernels know: codegen/pointwise.py has a text
# for each.
ELEMENTWISE = frozenset(
    """
    add sub mul div pow cast neg exp sqrt rsqrt cos sin tanh sigmoid relu silu gelu softcap
    gated_activation aten.abs.default aten.log.default aten.log2.default aten.exp2.default
    aten.erf.default aten.floor.default aten.ceil.default aten.reciprocal.default
    aten.square.default aten.softplus.default aten.mish.default aten.leaky_relu.default
    aten.elu.default aten.clamp.default aten.clamp_min.default aten.clamp_max.default
    aten.maximum.default aten.minimum.default aten.where.self aten.masked_fill.Scalar
    aten.eq.Scalar aten.ne.Scalar aten.lt.Scalar aten.le.Scalar aten.gt.Scalar aten.ge.Scalar
    aten.eq.Tensor aten.ne.Tensor aten.lt.Tensor aten.le.Tensor aten.gt.Tensor aten.ge.Tensor
    aten.logical_and.default aten.logical_or.default aten.logical_not.default
    aten.bitwise_and.Tensor aten.bitwise_or.Tensor aten.bitwise_not.default
    """.split()
)
# Over the last dim, which stays as one of size 1.
REDUCTIONS = frozenset(
    ("aten.mean.dim", "aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default")
)
POWERS = (-1, -0.5, 0.5, 1, 2, 3, 4)
MAX_REDUCED = 16384  # a whole row has to be in one program's registers
FLOATS = frozenset(("f32", "bf16", "f16"))
DTYPES = FLOATS | frozenset(("i64", "i32", "bool"))


@op
def pointwise(*operands: Tensor, expr: str) -> Tensor:
    """A group of element-wise ops: ``expr`` over the operands, as in ``mul(sigmoid(a0), a1)``."""

    def apply(name: str, arguments: list[Tensor], attrs: dict[str, Any]) -> Tensor:
        definition = op_def(name)
        result: Tensor = definition.evaluate(*arguments, **definition.complete(attrs))
        return result

    return evaluate(parse_expression(expr), operands, apply)


@pointwise.infer
def _(*operands: TensorType, expr: str) -> TensorType:
    return evaluate(parse_expression(expr), operands, result_type)


def result_type(name: str, arguments: list[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    """The type of a call in an expression. Raises VerifyError."""
    types = infer_types(name, arguments, op_def(name).complete(attrs))
    if len(types) != 1:
        raise VerifyError(f"pointwise: {name} has {len(types)} results")
    return tensor_type(types[0])


def has_kernel(name: str) -> bool:
    """Whether this is the name of an op that kernels know, on operands that they can take."""
    return name in ELEMENTWISE or name in REDUCTIONS


def why_not(name: str, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> str | None:
    """Why a kernel cannot run this op, given the types of its operands and its result; or None."""
    if not has_kernel(name):
        return f"there is no kernel for {name}"
    foreign = [each.dtype for each in types if each.dtype not in DTYPES]
    if foreign:
        return f"kernels do not compute in {foreign[0]}"
    if name in REDUCTIONS:
        return _why_not_reduced(types[0], attrs)
    if name == "pow" and attrs.get("scalar") not in POWERS:
        return "it is a general power"
    integers = all(each.dtype not in FLOATS for each in types)
    if integers and name == "pow":
        return "it is a power of integers"
    return None


def _why_not_reduced(x: TensorType, attrs: Mapping[str, Any]) -> str | None:
    dims = attrs.get("dim")
    if not attrs.get("keepdim") or dims not in ((-1,), (x.rank - 1,)) or attrs.get("dtype"):
        return "it does not keep its last dim, or reduces others"
    width = x.shape[-1]
    if x.dtype not in FLOATS or not isinstance(width, int) or not 1 < width <= MAX_REDUCED:
        return f"{x} has no rows that a kernel reduces"
    return None


def tile_shape(types: Sequence[TensorType]) -> tuple[SymDim | int, ...]:
    """The shape that all values of a group are spread over: rows of a known width.

    Raises VerifyError for shapes that do not go together or have no such rows.
    """
    shape = broadcast([each.shape for each in types])
    is_growing = len(shape) > 1 and isinstance(shape[0], SymDim) and not shape[0].offset
    if not is_growing or not all(isinstance(dim, int) for dim in shape[1:]):
        raise VerifyError(f"[{', '.join(map(str, shape))}] are no rows of a known width")
    return shape
