"""Element-wise ops. Two-operand ones broadcast and promote as PyTorch does; ``scalar`` stands in
for a second operand that is a Python number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import OpDef, op
from octavo.ir.types import DTYPE_NAMES, DTYPES, Dim, TensorType


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The shape that all these expand to, by PyTorch's rules. Raises VerifyError."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result: list[Dim] = []
    for axis, dims in enumerate(zip(*padded, strict=True)):
        wide = [dim for dim in dict.fromkeys(dims) if dim != 1]
        if len(wide) > 1:
            raise VerifyError(f"dim {axis - rank} is {wide[0]} and {wide[1]}: cannot broadcast")
        result.append(wide[0] if wide else 1)
    return tuple(result)


def elementwise(function: Callable[..., Tensor]) -> OpDef:
    """Register an op whose result has the broadcast shape of its operands."""
    definition = op(function)

    @definition.infer
    def rule(*operands: TensorType | None, **attrs: Any) -> TensorType:
        tensors = [operand for operand in operands if operand is not None]
        # PyTorch promotes by rank, dtype and kind of scalar: a single element shows the outcome.
        ones = [
            None if t is None else torch.ones((1,) * t.rank, dtype=t.torch_dtype) for t in operands
        ]
        result = function(*ones, **attrs)
        return TensorType(DTYPE_NAMES[result.dtype], broadcast([t.shape for t in tensors]))

    return definition


def _second(y: Tensor | None, scalar: float | None) -> Tensor | float:
    if y is not None and scalar is None:
        return y
    if y is None and scalar is not None:
        return scalar
    raise VerifyError("exactly one of the second operand and the attribute scalar must be given")


@elementwise
def add(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x + y``."""
    return x + _second(y, scalar)


@elementwise
def sub(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x - y``."""
    return x - _second(y, scalar)


@elementwise
def mul(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x * y``."""
    return x * _second(y, scalar)


@elementwise
def div(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x / y``, true division."""
    return x / _second(y, scalar)


@elementwise
def pow_(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x ** y``."""
    return torch.pow(x, _second(y, scalar))


@elementwise
def cast(x: Tensor, *, dtype: str) -> Tensor:
    """Convert to a dtype, rounding to nearest even."""
    return x.to(DTYPES[dtype])


@elementwise
def neg(x: Tensor) -> Tensor:
    """``-x``."""
    return -x


@elementwise
def exp(x: Tensor) -> Tensor:
    """``e ** x``."""
    return torch.exp(x)


@elementwise
def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return torch.sqrt(x)


@elementwise
def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``."""
    return torch.rsqrt(x)


@elementwise
def cos(x: Tensor) -> Tensor:
    """Cosine, radians."""
    return torch.cos(x)


@elementwise
def sin(x: Tensor) -> Tensor:
    """Sine, radians."""
    return torch.sin(x)


@elementwise
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


@elementwise
def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e ** -x)``."""
    return torch.sigmoid(x)


@elementwise
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return F.relu(x)


@elementwise
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` (Elfwing et al. 2017)."""
    return F.silu(x)


@elementwise
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """``x * Phi(x)``; ``approximate="tanh"`` is the tanh form (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate=approximate)


@elementwise
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """Squash to ``(-cap, cap)``: ``cap * tanh(x / cap)``."""
    return torch.tanh(x / cap) * cap


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


@elementwise
def gated_activation(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """``activation(gate) * up``: SwiGLU, GeGLU and kin (Shazeer 2020). A key of ACTIVATIONS."""
    return ACTIVATIONS[activation](gate) * up
