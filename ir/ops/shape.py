"""Ops that only rearrange. Dims may be negative where PyTorch allows it; importers normalise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import op
from octavo.ir.types import DTYPE_NAMES, Dim, SymDim, TensorType


@op
def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """The same elements in row-major order with another shape; no dim is -1."""
    return x.reshape(shape)


def _element_count(shape: tuple[Dim, ...]) -> tuple[int, str | None, int]:
    """Constant factor, symbol and scaled offset of the product of the dims."""
    symbolic = [dim for dim in shape if isinstance(dim, SymDim)]
    constant = math.prod(dim for dim in shape if isinstance(dim, int))
    if not symbolic:
        return constant, None, 0
    if len(symbolic) > 1:
        raise VerifyError(f"a shape with two symbolic dims {shape} cannot be reshaped")
    dim = symbolic[0]
    return constant * dim.scale, dim.symbol, constant * dim.offset


@reshape.infer
def _(x: TensorType, *, shape: tuple[Dim, ...]) -> TensorType:
    if _element_count(x.shape) != _element_count(shape):
        raise VerifyError(f"reshape: {x} has another number of elements than {list(shape)}")
    return x.with_shape(*shape)


@op
def expand(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """Broadcast to a shape without copying."""
    return x.expand(shape)


@op
def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    """Swap two dims."""
    return x.transpose(dim0, dim1)


@transpose.infer
def _(x: TensorType, *, dim0: int, dim1: int) -> TensorType:
    if not (-x.rank <= dim0 < x.rank and -x.rank <= dim1 < x.rank):
        raise VerifyError(f"transpose: dims {dim0} and {dim1} do not fit {x}")
    shape = list(x.shape)
    shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
    return x.with_shape(*shape)


@op
def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Reorder all dims: dim ``i`` of the result is dim ``dims[i]`` of ``x``."""
    return x.permute(dims)


@op
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    """Insert a dim of size 1."""
    return x.unsqueeze(dim)


@op
def squeeze(x: Tensor, *, dim: int) -> Tensor:
    """Drop a dim of size 1."""
    return x.squeeze(dim)


@squeeze.infer
def _(x: TensorType, *, dim: int) -> TensorType:
    if not -x.rank <= dim < x.rank or x.shape[dim] != 1:
        raise VerifyError(f"squeeze: dim {dim} of {x} is not 1")
    dim %= x.rank
    return x.with_shape(*x.shape[:dim], *x.shape[dim + 1 :])


@op
def slice_(x: Tensor, *, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    """``x[start:end:step]`` along a dim."""
    cut: Tensor = torch.ops.aten.slice.Tensor(x, dim, start, end, step)
    return cut


@op
def select(x: Tensor, *, dim: int, index: int) -> Tensor:
    """``x[index]`` along a dim, which goes."""
    return x.select(dim, index)


@op
def split(x: Tensor, *, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """Cut along a dim into pieces of the given sizes."""
    return torch.split(x, list(sizes), dim)


@op
def concat(*xs: Tensor, dim: int) -> Tensor:
    """Join along a dim."""
    return torch.cat(xs, dim)


@concat.infer
def _(*xs: TensorType, dim: int) -> TensorType:
    first = xs[0]
    if not -first.rank <= dim < first.rank:
        raise VerifyError(f"concat: {first} has no dim {dim}")
    axis = dim % first.rank
    before, after = first.shape[:axis], first.shape[axis + 1 :]
    for x in xs:
        if x.rank != first.rank or (x.shape[:axis], x.shape[axis + 1 :]) != (before, after):
            raise VerifyError(f"concat: {first} and {x} differ beside dim {dim}")
    promoted = torch.cat([torch.ones(1, dtype=x.torch_dtype) for x in xs]).dtype
    return TensorType(DTYPE_NAMES[promoted], (*before, _sum(xs, axis), *after))


def _sum(xs: tuple[TensorType, ...], axis: int) -> Dim:
    dims = [x.shape[axis] for x in xs]
    symbolic = [dim for dim in dims if isinstance(dim, SymDim)]
    offset = sum(dim.offset if isinstance(dim, SymDim) else dim for dim in dims)
    if not symbolic:
        return offset
    if len({dim.symbol for dim in symbolic}) > 1:
        raise VerifyError(f"concat: the sum of the dims {dims} is not affine in one symbol")
    return SymDim(symbolic[0].symbol, sum(dim.scale for dim in symbolic), offset)


@op
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` along the first dim."""
    return x.index_select(0, rows)


@gather_rows.infer
def _(x: TensorType, rows: TensorType) -> TensorType:
    if rows.dtype not in ("i64", "i32") or rows.rank != 1 or x.rank == 0:
        raise VerifyError(f"gather_rows: needs a vector of integers, got {rows}")
    return x.with_shape(rows.shape[0], *x.shape[1:])


@op
def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """``x[..., columns]``."""
    return x.index_select(-1, columns)


@gather_columns.infer
def _(x: TensorType, columns: TensorType) -> TensorType:
    if columns.dtype not in ("i64", "i32") or columns.rank != 1 or x.rank == 0:
        raise VerifyError(f"gather_columns: needs a vector of integers, got {columns}")
    return x.with_shape(*x.shape[:-1], columns.shape[0])
