"""Matrix products and table look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.quant_tensor import QuantTensor, dense
from octavo.ir.types import QuantType, TensorType


@op
def linear(x: Tensor, weight: Tensor | QuantTensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]``.

    A quantised weight is dequantised to the dtype of x.
    """
    return F.linear(x, dense(weight, x.dtype), bias)


@linear.infer
def _(x: TensorType, weight: TensorType | QuantType, bias: TensorType | None = None) -> TensorType:
    if weight.rank != 2 or x.shape[-1] != weight.shape[1]:
        raise VerifyError(f"linear: the last dim of {x} is not K of the weight {weight}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise VerifyError(f"linear: the bias {bias} does not fit the weight {weight}")
    factors = {weight.dtype} if isinstance(weight, TensorType) else set()
    if factors | {bias.dtype if bias else x.dtype} != {x.dtype}:
        raise VerifyError(f"linear: dtypes differ: x {x}, weight {weight}, bias {bias}")
    return x.with_shape(*x.shape[:-1], weight.shape[0])


@op
def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, batched and broadcast as in PyTorch."""
    return torch.matmul(x, y)


@op
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[ids]``: integer ids of any shape, weight ``[rows, width]``."""
    return F.embedding(ids, weight)


@embedding.infer
def _(ids: TensorType, weight: TensorType) -> TensorType:
    if ids.dtype not in ("i64", "i32") or weight.rank != 2:
        raise VerifyError(f"embedding: needs integer ids and a matrix, got {ids} and {weight}")
    return weight.with_shape(*ids.shape, weight.shape[1])
