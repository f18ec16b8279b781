"""The schemes chosen under a budget are the best there are."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.calibrate.budget import Candidate, choose_under_budget
from octavo.ir.errors import OctavoError


def _table(*rows: tuple[float, float, float]) -> list[list[Candidate]]:
    """Costs of 4, 8 and 16 bits of matrices of 100, 200, ... values; bytes follow."""
    sizes = [100 * (index + 1) for index in range(len(rows))]
    return [
        [
            Candidate(name, size * bits // 8, cost)
            for name, bits, cost in zip(("int4", "int8", "none"), (4, 8, 16), row, strict=True)
        ]
        for size, row in zip(sizes, rows, strict=True)
    ]


def test_the_table_of_the_docs() -> None:
    table = _table((5.0, 1.0, 0.0), (0.5, 0.1, 0.0), (9.0, 0.2, 0.0))
    # 4 bits take 300 bytes, 16 take 1,200. 500 hold the first and the last at 8 bits: all but 0.5.
    chosen = choose_under_budget(table, 500)
    assert [c.scheme for c in chosen] == ["int8", "int4", "int8"]
    assert [c.scheme for c in choose_under_budget(table, 1200)] == ["none"] * 3
    assert [c.scheme for c in choose_under_budget(table, 300)] == ["int4"] * 3


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_budget_costs_less(seed: int) -> None:
    draw = random.Random(seed)
    table = [
        [Candidate(str(k), draw.randrange(1, 60), draw.random()) for k in range(4)]
        for _ in range(6)
    ]
    least = sum(min(c.num_bytes for c in each) for each in table)
    budget = least + draw.randrange(80)
    chosen = choose_under_budget(table, budget)
    assert sum(c.num_bytes for c in chosen) <= budget
    best = min(
        sum(c.cost for c in choice)
        for choice in itertools.product(*table)
        if sum(c.num_bytes for c in choice) <= budget
    )
    assert sum(c.cost for c in chosen) == pytest.approx(best)


def test_sizes_of_real_models_stay_within_the_budget() -> None:
    draw = random.Random(1)
    table = [
        [Candidate(str(k), draw.randrange(10**7, 10**8), draw.random()) for k in range(4)]
        for _ in range(130)
    ]
    least = sum(min(c.num_bytes for c in each) for each in table)
    for budget in (least, least + 1, int(1.01 * least), 2 * least):
        assert sum(c.num_bytes for c in choose_under_budget(table, budget)) <= budget


def test_a_budget_that_cannot_be_met_is_refused_with_the_least() -> None:
    table = [[Candidate("int4", 5 * 10**8, 1.0), Candidate("none", 2 * 10**9, 0.0)]] * 3
    with pytest.raises(OctavoError, match=r"least possible is 1\.500 GB"):
        choose_under_budget(table, 10**9)
