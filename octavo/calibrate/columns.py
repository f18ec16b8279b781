"""Single columns of a quantised matrix: their scales, and rounding to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, round_to_sides


@dataclass(frozen=True)
class Columns:
    """A quantised matrix whose codes and scales are changed in their place, a column or a group of
    columns at a time."""

    made: QuantTensor

    @property
    def group(self) -> int:
        """How many columns share a scale."""
        return self.made.scheme.block[1] or self.made.shape[1]

    def set_sides(self, group: int, part: QuantTensor) -> None:
        """Take the scales and so on of a group from a matrix that is this group alone."""
        for name, tensor in part.parts():
            if name != "codes":
                getattr(self.made, name)[:, group] = tensor[:, 0]

    def round(self, index: int, values: Tensor) -> Tensor:
        """Set a column to the codes nearest to ``values [N]``; what they stand for, ``f64[N]``."""
        scale, zero, offset = self._sides(index)
        assert scale is not None, "there are always scales"
        codes = round_to_sides(values.float(), self.made.scheme, scale, zero, offset)
        self.made.codes[:, index] = codes
        # As a matrix of one column whose rows have scales of their own.
        parts = [None if part is None else part[:, None] for part in (scale, zero, offset)]
        assert parts[0] is not None, "there are always scales"
        scheme = one_group(self.made.scheme)
        one = QuantTensor(scheme, codes[:, None], parts[0], parts[1], parts[2])
        return one.dequantize()[:, 0].double()

    def _sides(self, index: int) -> tuple[Tensor | None, ...]:
        """Scale, zero and offset of each row at a column."""
        at = index // self.group
        parts = (self.made.scales, self.made.zeros, self.made.offsets)
        return tuple(None if part is None else self._by_row(part[:, at]) for part in parts)

    def _by_row(self, side: Tensor) -> Tensor:
        rows = self.made.shape[0]
        up = self.made.scheme.block[0] or rows
        return side if up == 1 else side.repeat_interleave(up)[:rows]


def one_group(scheme: QuantScheme) -> QuantScheme:
    """The scheme of a matrix whose rows have one scale each."""
    return replace(scheme, block=(1, None))


def copied(matrix: QuantTensor) -> QuantTensor:
    """The same in tensors of its own."""
    parts: dict[str, Any] = {name: part.clone() for name, part in matrix.parts()}
    return replace(matrix, **parts)
