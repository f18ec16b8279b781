"""Element-wise ops. Two-operand ones broadcast and promote as PyTorch does; ``scalar`` stands in
for a second operand that is a Python number."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.types import DTYPES


def _second(y: Tensor | None, scalar: float | None) -> Tensor | float:
    if y is not None and scalar is None:
        return y
    if y is None and scalar is not None:
        return scalar
    raise VerifyError("exactly one of the second operand and the attribute scalar must be given")


@op
def add(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x + y``."""
    return x + _second(y, scalar)


@op
def sub(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x - y``."""
    return x - _second(y, scalar)


@op
def mul(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x * y``."""
    return x * _second(y, scalar)


@op
def div(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x / y``, true division."""
    return x / _second(y, scalar)


@op
def pow_(x: Tensor, y: Tensor | None = None, *, scalar: float | None = None) -> Tensor:
    """``x ** y``."""
    return torch.pow(x, _second(y, scalar))


@op
def cast(x: Tensor, *, dtype: str) -> Tensor:
    """Convert to a dtype, rounding to nearest even."""
    return x.to(DTYPES[dtype])


@op
def neg(x: Tensor) -> Tensor:
    """``-x``."""
    return -x


@op
def exp(x: Tensor) -> Tensor:
    """``e ** x``."""
    return torch.exp(x)


@op
def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return torch.sqrt(x)


@op
def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``."""
    return torch.rsqrt(x)


@op
def cos(x: Tensor) -> Tensor:
    """Cosine, radians."""
    return torch.cos(x)


@op
def sin(x: Tensor) -> Tensor:
    """Sine, radians."""
    return torch.sin(x)


@op
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


@op
def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e ** -x)``."""
    return torch.sigmoid(x)


@op
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return F.relu(x)


@op
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` (Elfwing et al. 2017)."""
    return F.silu(x)


@op
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """``x * Phi(x)``; ``approximate="tanh"`` is the tanh form (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate=approximate)


@op
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


@op
def gated_activation(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """``activation(gate) * up``: SwiGLU, GeGLU and kin (Shazeer 2020). A key of ACTIVATIONS."""
    return ACTIVATIONS[activation](gate) * up
