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

# Fractions of the range of a block that are tried: an outlier that is cut off costs less than the
# coarser steps of all others. Then the neighbours of the best, at half the distance, and again.
_FRACTIONS = tuple(1 - 0.05 * step for step in range(1, 9))
_REFINEMENTS = (0.025, 0.0125)
# Elements that are quantised at a time: what a search goes over again and again stays in a cache.
_PIECE = 1 << 18


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
    multiplied by them. ``search=False`` takes the whole range of each block. A search may give
    codes of up to 6 bits a negative scale, which puts the value of largest magnitude on the code
    that has no positive counterpart (-8 of 4 bits), as GGUF's Q4_0 does. Raises VerifyError for a K
    that is no multiple of the group, and for a NaN or an infinity.
    """
    scheme.scale_shape(*matrix.shape)
    if scheme.block[0] != 1:
        return _quantize_rows(matrix.float(), scheme, importance, search)
    step = max(1, _PIECE // matrix.shape[1])
    pieces = [
        _quantize_rows(rows.float(), scheme, importance, search)
        for rows in torch.split(matrix, step)
    ]
    return concat_rows(pieces)


def round_to_sides(
    values: Tensor,
    scheme: QuantScheme,
    scales: Tensor,
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The codes that come nearest to values, by scales and so on that broadcast against them."""
    return round_to_codes(_in_steps(values, _Sides(scales, zeros, offsets)), scheme)


@dataclass(frozen=True)
class _Sides:
    """Scales, zeros and offsets of blocks in their dtypes, shaped to broadcast against these."""

    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None

    def where(self, mask: Tensor, other: _Sides) -> _Sides:
        """The other's where the mask is true."""
        pairs = zip(
            (self.scales, self.zeros, self.offsets),
            (other.scales, other.zeros, other.offsets),
            strict=True,
        )
        chosen = (None if a is None or b is None else torch.where(mask, b, a) for a, b in pairs)
        scales, zeros, offsets = chosen
        assert scales is not None, "there are always scales"
        return _Sides(scales, zeros, offsets)


def _quantize_rows(
    matrix: Tensor, scheme: QuantScheme, importance: Tensor | None, search: bool
) -> QuantTensor:
    blocks = _blocks(matrix, scheme)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    if not bool((high - low).isfinite().all()):
        raise VerifyError("a matrix that is quantised holds a NaN or an infinity")
    if scheme.offset is None:
        low, high = low.clamp(max=0), high.clamp(min=0)
    weights = None if importance is None else _blocks(importance[None].float(), scheme)
    if weights is not None and scheme.block[0] != 1:
        weights = weights[:1, :1]
    sides = _sides_at(torch.ones_like(low), low, high, scheme)
    # The steps of a float grow with its values: a smaller range makes none of them finer.
    if search and scheme.codes != "f8e4m3":
        sides = _searched(sides, blocks, low, high, scheme, weights)
    codes = round_to_codes(_in_steps(blocks, sides), scheme)
    rows, columns = matrix.shape
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    parts = (sides.scales, sides.zeros, sides.offsets)
    flat = [None if part is None else part[:, 0, :, 0].contiguous() for part in parts]
    assert flat[0] is not None, "there are always scales"
    return QuantTensor(scheme, codes, flat[0], flat[1], flat[2])


def _searched(
    sides: _Sides,
    blocks: Tensor,
    low: Tensor,
    high: Tensor,
    scheme: QuantScheme,
    weights: Tensor | None,
) -> _Sides:
    """The scales of the ranges that leave each block the least error."""
    best = torch.ones_like(low)
    least = _errors(blocks, sides, scheme, weights)

    def attempt(fractions: Tensor) -> None:
        nonlocal sides, best, least
        other = _sides_at(fractions, low, high, scheme, is_signed=scheme.format.bits <= 6)
        errors = _errors(blocks, other, scheme, weights)
        is_better = errors < least
        sides = sides.where(is_better, other)
        best = torch.where(is_better, fractions, best)
        least = torch.where(is_better, errors, least)

    # Scales that are powers of two: the next one down is all there is above half of the range.
    is_coarse = scheme.scale == "f8e8m0"
    for fraction in (0.5,) if is_coarse else _FRACTIONS:
        attempt(torch.full_like(low, fraction))
    for distance in () if is_coarse else _REFINEMENTS:
        middle = best
        attempt(middle - distance)
        attempt(middle + distance)
    return sides


def _blocks(matrix: Tensor, scheme: QuantScheme) -> Tensor:
    """``[rows of blocks, rows in a block, columns of blocks, columns in a block]``, zeros added."""
    rows, columns = matrix.shape
    up, across = scheme.block[0] or rows, scheme.block[1] or columns
    if columns % across or rows % up:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % across, 0, -rows % up))
    return matrix.reshape(matrix.shape[0] // up, up, matrix.shape[1] // across, across)


def _sides_at(
    fraction: Tensor, low: Tensor, high: Tensor, scheme: QuantScheme, *, is_signed: bool = False
) -> _Sides:
    """The scales that put the ends of this fraction of each block's range on the last codes.

    ``is_signed`` allows negative scales.
    """
    form = scheme.format
    if scheme.offset is not None:
        scale = (high - low) * (fraction / (form.high - form.low))
        scales = _nonzero(scale.to(DTYPES[scheme.scale]))
        middle, half = (low + high) / 2, (form.high + form.low) / 2
        offsets = (middle - half * scales.float()).to(DTYPES[scheme.offset])
        # Of the whole range the smallest value is exact.
        whole = (low - form.low * scales.float()).to(DTYPES[scheme.offset])
        return _Sides(scales, None, torch.where(fraction == 1, whole, offsets))
    if scheme.zero is not None:
        scale = (high - low) * (fraction / (form.high - form.low))
        scales = _nonzero(scale.to(DTYPES[scheme.scale]))
        zeros = (form.low - low * fraction / scales.float()).round().clamp(form.low, form.high)
        return _Sides(scales, zeros.to(DTYPES[scheme.zero]), None)
    scale = torch.maximum(high, -low) * (fraction / form.largest)
    if is_signed and form.low == -form.high - 1:
        scale = torch.where(high > -low, -scale, scale)
    return _Sides(_nonzero(_rounded_scales(scale, scheme)), None, None)


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


def _in_steps(values: Tensor, sides: _Sides) -> Tensor:
    """Values on the scale of the codes, where these are the numbers of their format."""
    scales = sides.scales.float()
    if sides.offsets is not None:
        return (values - sides.offsets.float()).div_(scales)
    steps = values / scales
    return steps if sides.zeros is None else steps.add_(sides.zeros.float())


def _errors(blocks: Tensor, sides: _Sides, scheme: QuantScheme, weights: Tensor | None) -> Tensor:
    """The squared error of each block, of the shape of the scales."""
    steps, form = _in_steps(blocks, sides), scheme.format
    if form.table:
        rounded = torch.tensor(form.table)[round_to_codes(steps, scheme).long()]
    else:
        rounded = steps.round().clamp_(form.low, form.high)
    gaps = rounded.sub_(steps)
    if weights is None:
        squares = torch.linalg.vector_norm(gaps, dim=(1, 3), keepdim=True).square_()
    else:
        squares = gaps.square_().mul_(weights).sum((1, 3), keepdim=True)
    errors: Tensor = squares.mul_(sides.scales.float().square())
    return errors
