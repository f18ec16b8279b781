"""Quantised matrices: their parts, the values that these stand for, and rounding to nearest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import DTYPE_NAMES, DTYPES

# Fractions of the largest magnitude of a block that are tried as its range: an outlier that is cut
# off costs less than the coarser steps of all others.
_RANGES = tuple(1 - 0.02 * step for step in range(21))
_ROWS = 1 << 22  # elements that are quantised at a time


@dataclass(frozen=True)
class QuantTensor:
    """A matrix ``[N, K]`` as a scheme holds it, not packed.

    ``codes [N, K]`` in the dtype of the code format; ``scales``, ``zeros`` and ``offsets`` of the
    shape ``scheme.scale_shape(N, K)`` in the scheme's dtypes, the last two None where it has none.
    """

    scheme: QuantScheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors as they are, not packed."""
        return sum(part.nbytes for _, part in self.parts())

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors by name: codes, scales, and zeros and offsets if there are any."""
        for name in ("codes", "scales", "zeros", "offsets"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def check(self) -> None:
        """Raise VerifyError unless shapes and dtypes are those of the scheme."""
        scheme = self.scheme
        sides = scheme.scale_shape(*self.shape)
        expected = {
            "codes": (scheme.format.dtype, self.shape),
            "scales": (scheme.scale, sides),
            "zeros": (scheme.zero, sides),
            "offsets": (scheme.offset, sides),
        }
        found = {
            name: (DTYPE_NAMES.get(part.dtype), tuple(part.shape)) for name, part in self.parts()
        }
        wanted = {name: kind for name, kind in expected.items() if kind[0] is not None}
        if found != wanted:
            raise VerifyError(f"a matrix of {scheme} has {wanted}, got {found}")

    def values(self) -> Tensor:
        """The numbers of the codes before zero and scale, ``f32[N, K]``."""
        table = self.scheme.format.table
        if not table:
            return self.codes.float()
        return torch.tensor(table, device=self.codes.device)[self.codes.long()]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix: ``(value - zero) * scale + offset``, computed in f32 and rounded once."""
        result = self.values()
        if self.zeros is not None:
            result -= self._spread(self.zeros)
        result *= self._spread(self.scales)
        if self.offsets is not None:
            result += self._spread(self.offsets)
        return result.to(dtype)

    def _spread(self, sides: Tensor) -> Tensor:
        """One number for each element, ``f32[N, K]``, of numbers for each block."""
        return spread(sides, self.scheme, self.shape)


def dense(weight: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor:
    """A matrix in a dtype, dequantised if it is quantised."""
    return weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)


def spread(sides: Tensor, scheme: QuantScheme, shape: tuple[int, int]) -> Tensor:
    """Numbers for each block of a scheme as numbers for each element, ``f32[N, K]``."""
    wide = sides.float()
    for dim, (size, block) in enumerate(zip(shape, scheme.block, strict=True)):
        wide = wide.repeat_interleave(block or size, dim).narrow(dim, 0, size)
    return wide


def concat_rows(parts: list[QuantTensor]) -> QuantTensor:
    """Matrices of one scheme and K under one another. Raises VerifyError where blocks would mix."""
    first = parts[0]
    block = first.scheme.block[0]
    if any(part.scheme != first.scheme for part in parts):
        raise VerifyError(f"schemes differ: {sorted({str(part.scheme) for part in parts})}")
    if block is None or any(part.shape[0] % block for part in parts[:-1]):
        raise VerifyError(f"rows of {first.scheme} end inside a block")
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name, _ in first.parts()
    }
    return replace(first, **joined)


def round_to_codes(values: Tensor, scheme: QuantScheme) -> Tensor:
    """The nearest codes to values that are already divided by their scales, of the same shape."""
    form = scheme.format
    if form.table:
        table, order = torch.tensor(form.table, device=values.device).sort(stable=True)
        middles = (table[1:] + table[:-1]) / 2
        return order[torch.bucketize(values.contiguous(), middles)].to(DTYPES[form.dtype])
    if scheme.codes == "f8e4m3":
        return values.clamp(-form.high, form.high).to(DTYPES[form.dtype])
    return values.round().clamp(form.low, form.high).to(DTYPES[form.dtype])


def quantize(
    matrix: Tensor,
    scheme: QuantScheme,
    *,
    importance: Tensor | None = None,
    search: bool = True,
) -> QuantTensor:
    """Round a matrix ``[N, K]`` to nearest, with the scales that leave the least squared error.

    ``importance`` ``f32[K]`` weighs the errors of the columns, such as the mean square of what is
    multiplied by them. ``search=False`` takes the whole range of each block. Raises VerifyError
    for a K that is no multiple of the group, and for a NaN or an infinity.
    """
    scheme.scale_shape(*matrix.shape)
    if not bool(torch.isfinite(matrix).all()):
        raise VerifyError("a matrix that is quantised holds a NaN or an infinity")
    if scheme.block[0] != 1:
        return _quantize_rows(matrix.float(), scheme, importance, search)
    step = max(1, _ROWS // matrix.shape[1])
    pieces = [
        _quantize_rows(rows.float(), scheme, importance, search)
        for rows in torch.split(matrix, step)
    ]
    return concat_rows(pieces)


def _quantize_rows(
    matrix: Tensor, scheme: QuantScheme, importance: Tensor | None, search: bool
) -> QuantTensor:
    low, high = _ends(matrix, scheme)
    ranges = _RANGES if search and scheme.codes != "f8e4m3" else (1.0,)
    best = _at_range(matrix, scheme, low, high)
    if len(ranges) == 1:
        return best
    least = _block_errors(matrix, best, importance)
    for fraction in ranges[1:]:
        other = _at_range(matrix, scheme, low * fraction, high * fraction)
        errors = _block_errors(matrix, other, importance)
        better = errors < least
        least = torch.where(better, errors, least)
        best = _choose(better, other, best)
    return best


def _ends(matrix: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each block, zero included."""
    blocks = _blocks(matrix, scheme)
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def _blocks(matrix: Tensor, scheme: QuantScheme) -> Tensor:
    """``[rows of blocks, rows in a block, columns of blocks, columns in a block]``, zeros added."""
    rows, columns = matrix.shape
    up, across = scheme.block[0] or rows, scheme.block[1] or columns
    padded = torch.nn.functional.pad(matrix, (0, -columns % across, 0, -rows % up))
    return padded.view(padded.shape[0] // up, up, padded.shape[1] // across, across)


def _at_range(matrix: Tensor, scheme: QuantScheme, low: Tensor, high: Tensor) -> QuantTensor:
    """The matrix rounded with scales that put these ends of each block on the last codes."""
    form, shape = scheme.format, (matrix.shape[0], matrix.shape[1])
    is_spanning = scheme.zero is not None or scheme.offset is not None
    if is_spanning:
        scale = (high - low) / (form.high - form.low)
    else:
        scale = torch.maximum(high, -low) / form.largest
    scales = _nonzero(_rounded_scales(scale, scheme))
    zeros = offsets = None
    values = matrix / spread(scales, scheme, shape)
    if scheme.zero is not None:
        zeros = (form.low - low / scales.float()).round().clamp(form.low, form.high)
        zeros = zeros.to(DTYPES[scheme.zero])
        values += spread(zeros, scheme, shape)
    if scheme.offset is not None:
        offsets = (low - form.low * scales.float()).to(DTYPES[scheme.offset])
        values -= spread(offsets.float() / scales.float(), scheme, shape)
    return QuantTensor(scheme, round_to_codes(values, scheme), scales, zeros, offsets)


def _rounded_scales(scale: Tensor, scheme: QuantScheme) -> Tensor:
    if scheme.scale != "f8e8m0":
        return scale.to(DTYPES[scheme.scale])
    # A power of two that no value overflows: rounding up, where the dtype's own cast goes to the
    # nearest.
    exponent = torch.ceil(torch.log2(scale.clamp(min=2.0**-126)))
    return torch.exp2(exponent).to(DTYPES[scheme.scale])


def _nonzero(scales: Tensor) -> Tensor:
    """A block of zeros has codes of zero and any scale; one keeps it from dividing by zero."""
    wide = scales.float()
    return torch.where(wide == 0, torch.ones_like(wide), wide).to(scales.dtype)


def _block_errors(matrix: Tensor, made: QuantTensor, importance: Tensor | None) -> Tensor:
    errors = (made.dequantize() - matrix).square_()
    if importance is not None:
        errors *= importance
    return _blocks(errors, made.scheme).sum((1, 3))


def _choose(better: Tensor, other: QuantTensor, best: QuantTensor) -> QuantTensor:
    """The blocks of ``other`` where it is better, else those of ``best``."""
    scheme, shape = best.scheme, best.shape
    mask = spread(better, scheme, shape).bool()
    chosen: dict[str, Any] = {"codes": torch.where(mask, other.codes, best.codes)}
    for name, part in best.parts():
        if name != "codes":
            chosen[name] = torch.where(better, getattr(other, name), part)
    return replace(best, **chosen)
