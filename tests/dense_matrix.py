"""What a quantised matrix stands for, by its definition alone."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.quant_tensor import QuantTensor


def dense(matrix: QuantTensor) -> Tensor:
    """``(code - zero) * scale + offset`` in float64."""
    scheme, (n, k) = matrix.scheme, matrix.shape
    table = scheme.format.table
    values = torch.tensor(table)[matrix.codes.long()].double() if table else matrix.codes.double()
    up, across = scheme.block[0] or n, scheme.block[1] or k

    def wide(sides: Tensor) -> Tensor:
        return sides.double()[torch.arange(n) // up][:, torch.arange(k) // across]

    if matrix.zeros is not None:
        values = values - wide(matrix.zeros)
    values = values * wide(matrix.scales)
    return values if matrix.offsets is None else values + wide(matrix.offsets)
