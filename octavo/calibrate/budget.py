"""Which scheme for which matrix, under a budget of bytes: the multiple-choice knapsack, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.ir.errors import OctavoError

# Bytes are counted in units of the budget's 65,536th part, rounded up: a choice never exceeds it.
_UNITS = 1 << 16


@dataclass(frozen=True)
class Candidate:
    """One way to hold a matrix: its scheme's name, bytes, and what it costs."""

    scheme: str
    num_bytes: int
    cost: float


def choose_under_budget(
    candidates: Sequence[Sequence[Candidate]], budget_bytes: int
) -> list[Candidate]:
    """One of each matrix's candidates, so that costs add up to the least within the budget.

    By dynamic programming over the bytes that are left (Kellerer, Pferschy and Pisinger 2004,
    Knapsack Problems, chapter 11). Raises OctavoError for a budget that cannot be met, saying the
    least.
    """
    least = sum(min(c.num_bytes for c in each) for each in candidates)
    if least > budget_bytes:
        raise OctavoError(
            f"no choice of schemes fits {_gb(budget_bytes)} of quantised matrices: the least"
            f" possible is {_gb(least)}"
        )
    unit = max(1, -(-budget_bytes // _UNITS))
    units = budget_bytes // unit
    costs = np.zeros(units + 1)  # the least of the matrices so far within so many units
    picks = []
    for each in candidates:
        options = np.full((len(each), units + 1), np.inf)
        for index, candidate in enumerate(each):
            size = -(-candidate.num_bytes // unit)
            if size <= units:
                options[index, size:] = costs[: units + 1 - size] + candidate.cost
        picks.append(options.argmin(0))
        costs = options.min(0)
    if not np.isfinite(costs[units]):  # by the rounding up alone
        return [min(each, key=lambda c: c.num_bytes) for each in candidates]
    chosen: list[Candidate] = []
    for each, pick in zip(reversed(candidates), reversed(picks), strict=True):
        chosen.append(each[int(pick[units])])
        units -= -(-chosen[-1].num_bytes // unit)
    return chosen[::-1]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB"
