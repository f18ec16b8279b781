"""PyTorch's symbolic sizes as dims of the IR."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.types import DTYPE_NAMES, Dim, SymDim, TensorType

_T = sympy.Symbol("T", integer=True, positive=True)


class Sizes:
    """Translates sizes; knows which symbols of the export mean the number of tokens."""

    def __init__(self, inputs: list[Tensor]) -> None:
        """``inputs``: the traced inputs ``[1, T]``; their lengths may be two symbols for one."""
        symbols = set().union(*(_expression(tensor.shape[1]).free_symbols for tensor in inputs))
        self._tokens = dict.fromkeys(symbols, _T)

    def dim(self, size: Any) -> Dim:
        """An int, a SymInt, or an fx node that computes one. Raises RefusedArchitecture."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if isinstance(size, int):
            return size
        expression = _expression(size)
        if not expression.free_symbols <= self._tokens.keys():
            raise RefusedArchitecture(f"a size depends on the data: {expression}")
        return self._affine(expression.xreplace(self._tokens))

    def _affine(self, expression: sympy.Expr) -> Dim:
        offset = expression.subs(_T, 0)
        scale = expression.subs(_T, 1) - offset
        is_affine = offset.is_Integer and scale.is_Integer
        if not is_affine or sympy.expand(expression - scale * _T - offset) != 0:
            raise RefusedArchitecture(f"a size is not affine in the number of tokens: {expression}")
        return SymDim("T", int(scale), int(offset)) if scale else int(offset)

    def type(self, tensor: Tensor) -> TensorType:
        """The IR type of a traced tensor. Raises RefusedArchitecture for a dtype the IR lacks."""
        if tensor.dtype not in DTYPE_NAMES:
            raise RefusedArchitecture(f"a tensor has the dtype {tensor.dtype}, which is unknown")
        return TensorType(DTYPE_NAMES[tensor.dtype], tuple(map(self.dim, tensor.shape)))


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def plus(dim: Dim, number: int) -> Dim:
    """A dim and an int added."""
    if isinstance(dim, int):
        return dim + number
    return SymDim(dim.symbol, dim.scale, dim.offset + number)
