"""Tokens against distributions computed another way."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.runtime.sampler import NOT_FINITE, SampleRow, sample
from octavo.runtime.sampling_filters import filter_logits
from octavo.runtime.sampling_params import SamplingParams

PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
LOGITS = torch.tensor(PROBABILITIES).log()[[3, 0, 5, 1, 4, 2]]  # not in order
BY_TOKEN = [0.1, 0.4, 0.04, 0.25, 0.06, 0.15]


def row(seed: int = 1, stream: int = 0, position: int = 0, **params: Any) -> SampleRow:
    banned = params.pop("banned", ())
    return SampleRow(SamplingParams(**params), seed, stream, position, banned)


def tokens(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows)]


def reference(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


CASES: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({}, reference(dict(enumerate(BY_TOKEN)))),
    ({"temperature": 0.5}, reference({i: p**2 for i, p in enumerate(BY_TOKEN)})),
    ({"temperature": 2.0}, reference({i: math.sqrt(p) for i, p in enumerate(BY_TOKEN)})),
    ({"top_k": 2}, reference({1: 0.4, 3: 0.25})),
    ({"top_k": 6}, reference(dict(enumerate(BY_TOKEN)))),
    ({"top_p": 0.7}, reference({1: 0.4, 3: 0.25, 5: 0.15})),
    ({"top_p": 0.39}, {1: 1.0}),
    ({"min_p": 0.3}, reference({1: 0.4, 3: 0.25, 5: 0.15})),
    # What is left of each filter is what the next one sees: 0.4 of the remaining 0.8 is half.
    ({"top_k": 3, "top_p": 0.45}, {1: 1.0}),
    ({"min_p": 0.3, "top_p": 0.6}, reference({1: 0.4, 3: 0.25})),
    # The temperature comes first: squared, the best has 0.16 of 0.2702, 59 %.
    ({"temperature": 0.5, "top_p": 0.55}, {1: 1.0}),
    ({"banned": (1,)}, reference({i: p for i, p in enumerate(BY_TOKEN) if i != 1})),
]


@pytest.mark.parametrize(("params", "expected"), CASES)
def test_frequencies_are_the_distribution(
    params: dict[str, Any], expected: dict[int, float]
) -> None:
    count = 4000
    rows = [row(position=position, **params) for position in range(count)]
    counts = Counter(tokens(LOGITS.expand(count, -1), rows))
    assert set(counts) == set(expected)
    chi_square = sum((counts[t] - count * p) ** 2 / (count * p) for t, p in expected.items())
    # Passed by chance once in ten thousand at 5 degrees of freedom, the most there are here.
    assert chi_square < 25.7


def test_temperature_zero_is_the_best_token() -> None:
    assert tokens(LOGITS.expand(3, -1), [row(temperature=0.0)] * 3) == [1, 1, 1]


def test_of_equal_logits_greedy_takes_the_first() -> None:
    assert tokens(torch.tensor([[0.0, 2.0, 2.0]]), [row(temperature=0.0)]) == [1]


def mixed_rows(count: int) -> list[SampleRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 1.7},
        {"min_p": 0.05, "logprobs": 3},
        {"banned": (5, 6)},
        {},
    ]
    return [row(seed=i, stream=i % 3, position=i, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("vocab_size", [50, 1500])
def test_a_row_gets_the_same_token_in_any_company(vocab_size: int) -> None:
    logits = torch.randn(35, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    rows = mixed_rows(35)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(35)]
    assert together == alone
    order = torch.randperm(35, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.expand(7, -1).clone()
    sample(logits, [*mixed_rows(7)[:5], row(banned=(1,)), row(min_p=0.5)])
    assert torch.equal(logits, LOGITS.expand(7, -1))


def test_the_nucleus_is_right_where_it_is_wider_than_the_candidates() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
    kept = filter_logits(logits, top_k=[0, 0], top_p=[0.95, 0.001], min_p=[0.0, 0.0])
    for index, goal in enumerate([0.95, 0.001]):
        order = sorted(range(5000), key=lambda i, r=index: -logits[r, i].item())  # type: ignore[misc]
        weights = [math.exp(logits[index, i].item()) for i in order]
        total, mass, expected = sum(weights), 0.0, set()
        for token, weight in zip(order, weights, strict=True):
            expected.add(token)
            mass += weight / total
            if mass >= goal:
                break
        assert set(torch.isfinite(kept[index]).nonzero()[:, 0].tolist()) == expected


def test_logprobs_are_of_the_raw_distribution() -> None:
    rows = [row(temperature=0.0, logprobs=2), row(temperature=0.0, logprobs=0, banned=(1, 3))]
    first, second = sample(LOGITS.expand(2, -1), rows)
    assert first.logprobs is not None
    assert first.logprobs.top_token_ids == (1, 3)
    assert first.logprobs.top_logprobs == pytest.approx([math.log(0.4), math.log(0.25)])
    assert (first.logprobs.chosen, first.logprobs.chosen_rank) == (
        pytest.approx(math.log(0.4)),
        1,
    )
    assert second.token_id == 5
    assert second.logprobs is not None
    assert second.logprobs.top_token_ids == ()
    assert (second.logprobs.chosen, second.logprobs.chosen_rank) == (
        pytest.approx(math.log(0.15)),
        3,
    )


def test_logprobs_minus_one_is_the_whole_vocabulary() -> None:
    [sampled] = sample(LOGITS[None], [row(temperature=0.0, logprobs=-1)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_token_ids == (1, 3, 5, 0, 4, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    first, second, third = sample(logits, [row(temperature=temperature)] * 3)
    assert second.error == NOT_FINITE
    assert first.error is None
    assert third.error is None
    assert first == sample(LOGITS[None], [row(temperature=temperature)])[0]


def test_a_tiny_temperature_is_all_but_greedy() -> None:
    assert set(
        tokens(LOGITS.expand(50, -1), [row(temperature=1e-4, position=i) for i in range(50)])
    ) == {1}


def test_seed_stream_and_position_each_change_the_draw() -> None:
    flat = torch.zeros(1, 100000)
    draws = {
        tokens(flat, [row(seed=seed, stream=stream, position=position)])[0]
        for seed, stream, position in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(draws) == 4
