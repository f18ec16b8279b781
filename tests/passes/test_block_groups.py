"""Which slots share a block table."""

from __future__ import annotations

import pytest

from octavo.passes.block_groups import MAX_GROUPS, Span, group_size, group_slots

FULL, LOCAL = Span(), Span(window=8)


def test_slots_that_see_everything_come_first_and_others_follow_in_runs() -> None:
    spans = [LOCAL, LOCAL, LOCAL, FULL, LOCAL, LOCAL, LOCAL, FULL, LOCAL]
    assert group_slots(spans) == [1, 1, 2, 0, 2, 3, 3, 0, 4]


@pytest.mark.parametrize("span", [FULL, LOCAL, Span(chunk=4)])
def test_slots_that_all_see_the_same_are_one_group(span: Span) -> None:
    assert group_slots([span] * 5) == [0] * 5


def test_each_span_has_groups_of_its_own() -> None:
    assert group_slots([LOCAL, Span(window=9), Span(chunk=8), FULL]) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("counts", "size", "num_groups"),
    [
        ([10, 52], 10, 7),  # Gemma 3 27B: the last group has two slots
        ([5, 29], 5, 7),  # 4B
        ([4, 22], 4, 7),  # 1B
        ([12, 12], 12, 2),  # gpt-oss 20B
        ([12, 13], 13, 2),  # one empty place rather than a group of one slot
        ([12, 15], 15, 2),
        ([12, 16], 12, 3),
        ([1, 31], 5, 8),  # groups of one slot would be 32
        ([7], 7, 1),
    ],
)
def test_the_size_of_a_group(counts: list[int], size: int, num_groups: int) -> None:
    assert group_size(counts) == size
    assert sum(-(-count // size) for count in counts) == num_groups <= MAX_GROUPS
