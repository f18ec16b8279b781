"""Coordinate descent on what GPTQ made: GPTQ decides on each column once, knowing only those before
it; here codes and scales are gone over again with all others as they are.

With ``E = W - Q`` and ``G = E H`` the error of the product, ``tr(E H E^T)``, is a parabola in each
number of Q. A column that moves by d changes it by ``-2 d G_j + d^2 H_jj``, so the best code is the
one nearest to ``Q_j + G_j / H_jj`` (QuantEase, Behdin et al. 2023, arXiv:2309.01885). Where a scale
moves by d, Q moves along the codes c of its group: the best d is ``(G c) / (c H c)``. No step makes
the error larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.calibrate.columns import Columns, copied
from octavo.ir.quant_tensor import QuantTensor, spread

# Columns whose effects on the rest are gathered into one product.
_COLUMNS = 32


def refine(matrix: Tensor, hessian: Tensor, start: QuantTensor, sweeps: int) -> QuantTensor:
    """Less of ``tr((W - Q) H (W - Q)^T)`` than ``start`` leaves of ``matrix [N, K]``.

    ``hessian f64[K, K]`` has its damping added. Scales are refitted and all codes chosen again, so
    many times; scales that rows share, or that are powers of two, stay. Computed in f64.
    """
    descent = _Descent(matrix, hessian, start)
    for _ in range(sweeps):
        descent.fit_sides()
        descent.round_columns()
    return descent.made


class _Descent:
    """Where the descent is: ``made``, the values that it stands for, and ``G``; both are held
    as ``f64[K, N]``, so that a column is contiguous."""

    def __init__(self, matrix: Tensor, hessian: Tensor, start: QuantTensor) -> None:
        self.made = copied(start)
        self._hessian = hessian
        self._columns = Columns(self.made)
        self._values = self._held()
        self._pull = hessian @ (matrix.double().t() - self._values)

    def _held(self) -> Tensor:
        return self.made.dequantize().t().double().contiguous()

    def fit_sides(self) -> None:
        """The scales, then the offsets, that leave least with the codes as they are."""
        scheme = self.made.scheme
        if scheme.block[0] != 1 or scheme.scale == "f8e8m0":
            return
        steps = self.made.values()
        if self.made.zeros is not None:
            steps -= spread(self.made.zeros, scheme, self.made.shape)
        group = self._columns.group
        for index, first in enumerate(range(0, self.made.shape[1], group)):
            held = slice(first, first + group)
            codes = steps[:, held].t().double()
            self._move(self.made.scales[:, index], codes, held)
            if self.made.offsets is not None:
                self._move(self.made.offsets[:, index], torch.ones_like(codes), held)
        # What a kernel computes is rounded to f32 once; the small steps above are not.
        self._values = self._held()

    def _move(self, side: Tensor, along: Tensor, held: slice) -> None:
        """Move a number of each row, in its place, for what multiplies it in these columns."""
        slope = (self._pull[held] * along).sum(0)
        curve = ((self._hessian[held, held] @ along) * along).sum(0).clamp(min=1e-300)
        moved = (side.double() + slope / curve).to(side.dtype)
        distance = moved.double() - side.double()
        is_better = (distance * (2 * slope - distance * curve) > 0) & (moved != 0)
        side.copy_(torch.where(is_better, moved, side))
        change = torch.where(is_better, distance, 0.0) * along
        self._pull.addmm_(self._hessian[:, held], change, alpha=-1)

    def round_columns(self) -> None:
        """The code of each column that leaves least with all others as they are."""
        columns = self.made.shape[1]
        for first in range(0, columns, _COLUMNS):
            held = slice(first, min(first + _COLUMNS, columns))
            pull, local = self._pull[held].clone(), self._hessian[held, held]
            changes = torch.zeros_like(pull)
            for i in range(len(local)):
                before = self._values[first + i]
                after = self._columns.round(first + i, before + pull[i] / local[i, i])
                torch.sub(after, before, out=changes[i])
                before.copy_(after)
                pull[i + 1 :].addr_(local[i, i + 1 :], changes[i], alpha=-1)
            self._pull.addmm_(self._hessian[:, held], changes, alpha=-1)
