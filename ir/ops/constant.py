"""Ops without operands: where the values of the weights region start."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.ops.registry import op
from octavo.ir.types import DTYPES, TensorType

SOURCED = (
    "checkpoint",
    "buffer",
)  # evaluated by whoever holds the model: see interpret.WeightSource


@op
def checkpoint(*, key: str, type: TensorType) -> Tensor:
    """A tensor of the checkpoint, converted to the declared dtype."""
    raise AssertionError("a checkpoint tensor is read by the interpreter's weight source")


@checkpoint.infer
def _(*, key: str, type: TensorType) -> TensorType:
    return type


@op
def buffer(*, key: str, type: TensorType) -> Tensor:
    """A buffer that the model computes when it is built and no checkpoint holds."""
    raise AssertionError("a buffer is read by the interpreter's weight source")


@buffer.infer
def _(*, key: str, type: TensorType) -> TensorType:
    return type


@op
def literal(*, data: tuple[object, ...] | float, type: TensorType) -> Tensor:
    """A few numbers written out: a scalar or nested lists."""
    return torch.tensor(data, dtype=DTYPES[type.dtype]).reshape(type.sizes({}))


@literal.infer
def _(*, data: object, type: TensorType) -> TensorType:
    return type


@op
def iota(*, n: int) -> Tensor:
    """``0, 1, ... n - 1`` in i64."""
    return torch.arange(n)


@iota.infer
def _(*, n: int) -> TensorType:
    return TensorType("i64", (n,))


@op
def fill(*, value: float, type: TensorType) -> Tensor:
    """A constant tensor of one value."""
    return torch.full(type.sizes({}), value, dtype=DTYPES[type.dtype])


@fill.infer
def _(*, value: float, type: TensorType) -> TensorType:
    return type
