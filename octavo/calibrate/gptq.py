"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after another, and those
that are still to come make up for the error of those that are done.

With ``H = X^T X`` of what a weight ``W`` is multiplied by, the error of the product is
``tr((W - Q) H (W - Q)^T)``. All that the algorithm needs of H is the upper Cholesky factor U of its
inverse: a column i that is off by d costs ``(d / U_ii)^2``, once the columns to its right are moved
by ``-d / U_ii * U_ij``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.calibrate.columns import Columns, copied, one_group
from octavo.calibrate.refine import refine
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize

# Columns whose updates of the rest are gathered into one product.
_COLUMNS = 128


@dataclass(frozen=True)
class GPTQOptions:
    """``damping`` is added to the diagonal of the Hessian, as a share of its mean. ``act_order``
    rounds the columns of the largest inputs first; scales are then those of the weight as it came
    (static groups), so that nothing is permuted when the model runs. ``sweeps`` is how often codes
    and scales are gone over again afterwards (refine.py). ``follows_whole``: a matrix is first
    moved to where its product with the inputs that it will have, those that quantised matrices
    give, is nearest to the product that the whole model has in its place (asymmetric calibration,
    Li et al. 2025, arXiv:2504.02692)."""

    damping: float = 0.01
    act_order: bool = False
    sweeps: int = 10
    follows_whole: bool = True


def gptq(
    matrix: Tensor, hessian: Tensor, scheme: QuantScheme, options: GPTQOptions | None = None
) -> QuantTensor:
    """Round ``matrix [N, K]`` for inputs of which ``hessian f64[K, K]`` is ``X^T X``.

    Scales are searched anew at the start of each group, for the values that the errors so far have
    left there. A row that plain rounding serves better is rounded plainly, so that the error is
    never above that of rounding to nearest. Computed in f64. Raises OctavoError for a Hessian that
    is not finite.
    """
    options = options or GPTQOptions()
    columns = matrix.shape[1]
    if hessian.shape != (columns, columns) or not bool(hessian.isfinite().all()):
        raise OctavoError(
            f"GPTQ needs a finite Hessian of [{columns}, {columns}], got {list(hessian.shape)}"
        )
    diagonal = damped_diagonal(hessian, options.damping)
    nearest = quantize(matrix, scheme, importance=diagonal.float())
    order = torch.arange(columns)
    if options.act_order:
        order = diagonal.argsort(descending=True, stable=True)
    factor = _upper_root(hessian, diagonal, order)
    gaps = (matrix.double() - nearest.dequantize().double())[:, order]
    plain = (gaps @ factor).square().sum(1)
    _invert_upper(factor)
    made, costs = _rounded(matrix.double(), factor, nearest, order, options.act_order)
    del factor
    made = _better(made, costs, nearest, plain)
    if not options.sweeps:
        return made
    damped = hessian.double().clone()
    damped.diagonal().copy_(diagonal)
    return refine(matrix, damped, made, options.sweeps)


def damped_diagonal(hessian: Tensor, damping: float) -> Tensor:
    """The diagonal with so much of its mean added, ``f64[K]``."""
    diagonal = hessian.diagonal().double().clone()
    # An input that was always zero says nothing of its column: it stands for itself alone.
    diagonal[diagonal == 0] = 1.0
    return diagonal + damping * diagonal.mean()


def _upper_root(hessian: Tensor, diagonal: Tensor, order: Tensor) -> Tensor:
    """The upper R with ``H = R R^T``, columns in ``order``; its inverse U has ``H^-1 = U^T U``.

    Turned about both axes the lower Cholesky factor of a matrix is such an upper one, so that no
    inverse of H itself is needed. Of K = 14,336 a matrix takes 1.6 GB; two are made.
    """
    turned = order.flip(0)
    flipped = hessian[turned[:, None], turned].double()
    flipped.diagonal().copy_(diagonal[turned])
    lower, info = torch.linalg.cholesky_ex(flipped)
    if int(info):
        raise OctavoError("GPTQ: the Hessian is not positive definite; use more damping or text")
    del flipped
    upper: Tensor = lower.flip(0, 1)
    return upper


def _invert_upper(matrix: Tensor) -> None:
    """Invert an upper triangular matrix in its place, halves first."""
    size = len(matrix)
    if size <= _COLUMNS:
        eye = torch.eye(size, dtype=matrix.dtype)
        matrix.copy_(torch.linalg.solve_triangular(matrix, eye, upper=True))
        return
    half = size // 2
    first, corner, last = matrix[:half, :half], matrix[:half, half:], matrix[half:, half:]
    _invert_upper(first)
    _invert_upper(last)
    corner.copy_(-(first @ corner @ last))


def _rounded(
    matrix: Tensor, factor: Tensor, start: QuantTensor, order: Tensor, is_static: bool
) -> tuple[QuantTensor, Tensor]:
    """The rounded matrix, and the error of each row, ``f64[N]``. ``start`` lends its scales where
    these are not searched anew."""
    scheme, (rows, columns) = start.scheme, start.shape
    group = scheme.block[1] or columns
    is_static = is_static or scheme.block[0] != 1 or group == columns
    width = _COLUMNS if is_static else max(1, _COLUMNS // group) * group
    made = copied(start)
    sides = Columns(made)
    rest, costs = matrix[:, order].clone(), torch.zeros(rows, dtype=torch.float64)
    for first in range(0, columns, width):
        last = min(first + width, columns)
        block, local = rest[:, first:last], factor[first:last, first:last]
        errors = torch.zeros_like(block)
        for i in range(last - first):
            column = first + i
            if not is_static and column % group == 0:
                weights = local.diagonal()[i : i + group].float().pow(-2)
                values = block[:, i : i + group].float()
                part = quantize(values, one_group(scheme), importance=weights)
                sides.set_sides(column // group, part)
            value = sides.round(int(order[column]), block[:, i])
            errors[:, i] = (block[:, i] - value) / local[i, i]
            block[:, i:] -= errors[:, i : i + 1] * local[i, i:]
        rest[:, last:] -= errors @ factor[first:last, last:]
        costs += errors.square().sum(1)
    return made, costs


def _better(made: QuantTensor, costs: Tensor, nearest: QuantTensor, plain: Tensor) -> QuantTensor:
    """Of each row, or of the whole where rows share scales, what costs less."""
    worse = costs > plain
    if made.scheme.block[0] != 1:
        return nearest if costs.sum() > plain.sum() else made
    chosen: dict[str, Any] = {}
    for name, part in made.parts():
        other = getattr(nearest, name)
        # Floats of 8 bits have no kernels for this, bytes have.
        kind = torch.uint8 if part.itemsize == 1 else part.dtype
        rows = torch.where(worse[:, None], other.view(kind), part.view(kind))
        chosen[name] = rows.view(part.dtype)
    return replace(made, **chosen)
