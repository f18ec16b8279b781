"""Which slots of the KV cache share a block table: those that keep the same part of the context.

A layer that sees a window needs no block behind it, one that sees all of the context needs every
block. So each span has block tables of its own, and what lies behind a window is freed.

All groups take their blocks from one pool, so a block has the same bytes in each: it has a *place*
for each of as many slots as the largest group has, and slot ``i`` of every group lies in place
``i``. A group with fewer slots leaves places empty. See "Block groups" in docs/scheduling.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# Each group has a block table in every step and lists of blocks for every sequence.
MAX_GROUPS = 8


class Span(NamedTuple):
    """What a slot's readers see of the context: the last tokens, a chunk, or (both None) all."""

    window: int | None = None
    chunk: int | None = None


def group_slots(spans: Sequence[Span]) -> list[int]:
    """The group of each slot, from 0 on; slots that see all of the context come first."""
    counts = Counter(sorted(spans, key=lambda span: span != Span()))  # a stable sort
    size = group_size(list(counts.values()))
    first_group: dict[Span, int] = {}
    num_groups = 0
    for span, count in counts.items():
        first_group[span] = num_groups
        num_groups += -(-count // size)
    seen: Counter[Span] = Counter()
    groups = []
    for span in spans:
        groups.append(first_group[span] + seen[span] // size)
        seen[span] += 1
    return groups


def group_size(counts: Sequence[int]) -> int:
    """Slots in a group, given how many slots have each span.

    As many as the rarest span has: none of its blocks has an empty place then, and the rarest is in
    nearly all models the one that sees everything and keeps the most. The commonest has the say
    where it is at most a quarter larger, since one group and a few empty places cost less than
    a second group that is nearly empty. More, if there would be too many groups.
    """
    least, most = min(counts), max(counts)
    size = most if 4 * most <= 5 * least else least
    while sum(-(-count // size) for count in counts) > MAX_GROUPS:
        size += 1
    return size
