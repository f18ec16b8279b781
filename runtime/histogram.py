"""Values counted by size, as Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class HistogramValue:
    """``counts[i]`` values are at most ``bounds[i]`` and above the bound before; one more count
    holds those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None when there is no value."""
        return self.total / self.count if self.count else None


class Histogram:
    """Counts of values by size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def value(self) -> HistogramValue:
        """What it holds now. Any thread."""
        return HistogramValue(self.bounds, tuple(self.counts), self.total)
