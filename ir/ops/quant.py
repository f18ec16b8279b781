"""Quantised matrices: where they come from, and back; see docs/quantization.md.

All but quant_embedding stand in the weights region. Schemes are attributes in their text form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from octavo.ir import quant_tensor
from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPES, QuantType, TensorType, Type

QUANT_SOURCED = ("quantized", "quantized_checkpoint")  # read by key from WeightSource


@op
def quantize(weight: Tensor, *, scheme: str) -> QuantTensor:
    """A matrix ``[N, K]`` rounded to the nearest codes of a scheme, its scales searched."""
    return quant_tensor.quantize(weight, QuantScheme.parse(scheme))


@quantize.infer
def _(weight: TensorType, *, scheme: str) -> QuantType:
    if weight.rank != 2:
        raise VerifyError(f"quantize: {weight} is no matrix")
    return _quant_type(scheme, weight.shape)


@op
def quantized(*, key: str, scheme: str, shape: tuple[int, int]) -> QuantTensor:
    """A matrix that a calibration has quantised, by its key there."""
    raise AssertionError("a quantised matrix is read by the interpreter's weight source")


@op
def quantized_checkpoint(*, key: str, scheme: str, shape: tuple[int, int]) -> QuantTensor:
    """A matrix that the checkpoint holds quantised, by its key there."""
    raise AssertionError("a quantised matrix is read by the interpreter's weight source")


@quantized.infer
@quantized_checkpoint.infer
def _(*, key: str, scheme: str, shape: tuple[int, int]) -> QuantType:
    return _quant_type(scheme, shape)


@op
def dequantize(weight: QuantTensor, *, dtype: str) -> Tensor:
    """``(value - zero) * scale + offset`` in f32, rounded once to ``dtype``."""
    return weight.dequantize(DTYPES[dtype])


@dequantize.infer
def _(weight: QuantType, *, dtype: str) -> TensorType:
    if not isinstance(weight, QuantType) or not DTYPES[dtype].is_floating_point:
        raise VerifyError(f"dequantize: no {dtype} matrix of {weight}")
    return TensorType(dtype, weight.shape)


@op
def quant_embedding(ids: Tensor, weight: QuantTensor, *, dtype: str) -> Tensor:
    """Rows of a quantised matrix: ``dequantize(weight, dtype)[ids]``, ids ``[T]``."""
    return F.embedding(ids, weight.dequantize(DTYPES[dtype]))


@quant_embedding.infer
def _(ids: TensorType, weight: QuantType, *, dtype: str) -> TensorType:
    if ids.dtype not in ("i64", "i32") or not isinstance(weight, QuantType):
        raise VerifyError(f"quant_embedding: no rows {ids} of {weight}")
    return TensorType(dtype, (*ids.shape, weight.shape[1]))


@op
def concat_rows(*parts: QuantTensor) -> QuantTensor:
    """Quantised matrices of one scheme and one K under one another."""
    return quant_tensor.concat_rows(list(parts))


@concat_rows.infer
def _(*parts: QuantType) -> QuantType:
    reason = why_no_concat(parts)
    if reason:
        raise VerifyError(f"concat_rows: {reason}")
    return QuantType(parts[0].scheme, (sum(part.shape[0] for part in parts), parts[0].shape[1]))


def why_no_concat(types: Sequence[Type]) -> str | None:
    """Why quantised matrices cannot stand under one another as one; None when they can."""
    parts = [part for part in types if isinstance(part, QuantType)]
    if len(parts) < len(types):
        return f"not all are quantised: {', '.join(map(str, types))}"
    if len({part.shape[1] for part in parts}) != 1:
        return f"they differ in K: {', '.join(map(str, parts))}"
    if len({part.scheme for part in parts}) != 1:
        return f"schemes differ: {', '.join(sorted({part.dtype for part in parts}))}"
    block = parts[0].scheme.block[0]
    if len(parts) > 1 and (block is None or any(part.shape[0] % block for part in parts[:-1])):
        return f"rows of {parts[0].scheme} end inside a block"
    return None


def _quant_type(scheme: str, shape: tuple[object, ...]) -> QuantType:
    rows, columns = shape
    assert isinstance(rows, int), "a weight has no symbolic dims"
    assert isinstance(columns, int), "a weight has no symbolic dims"
    parsed = QuantScheme.parse(scheme)
    parsed.scale_shape(rows, columns)
    return QuantType(parsed, (rows, columns))
