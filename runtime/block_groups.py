"""Block groups: the slots of the KV cache that keep the same part of the context share blocks.

All groups draw their blocks from one pool. A block has a *place* for each slot of the largest
group, and slot ``i`` of every group lies in place ``i``: see "Block groups" in docs/scheduling.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.ir.manifest import KVSlot, num_groups
from octavo.runtime.errors import ArtifactError


@dataclass(frozen=True)
class BlockGroup:
    """What a group keeps of the context: the last ``window`` tokens, the present chunk of
    ``chunk`` tokens, or (both None) all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether all of the context is kept."""
        return self.window is None and self.chunk is None

    def first_needed(self, position: int) -> int:
        """The oldest position that a token at ``position`` sees; later ones see none before."""
        oldest = 0 if self.window is None else max(0, position - self.window + 1)
        return oldest if self.chunk is None else max(oldest, position // self.chunk * self.chunk)

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence holds at once until it has ``num_tokens`` tokens.

        A step computes up to ``step_tokens`` of them; the first sees the tokens of its window, and
        blocks may begin before those and end after the step's.
        """
        needed = -(-num_tokens // block_size)
        spans = [span for span in (self.window, self.chunk) if span is not None]
        if not spans:
            return needed
        return min(needed, -(-(min(spans) - 1 + step_tokens) // block_size) + 1)


FULL = BlockGroup()


def block_groups(slots: Sequence[KVSlot]) -> tuple[BlockGroup, ...]:
    """The groups of a model; one that keeps everything where there are no slots.

    Raises ArtifactError when a group has no slot, or slots of one place differ in size.
    """
    members: list[list[KVSlot]] = [[] for _ in range(num_groups(slots))]
    for slot in slots:
        members[slot.group].append(slot)
    if slots and not all(members):
        raise ArtifactError("the manifest's KV slots leave a block group out; compile again")
    sizes: dict[int, set[tuple[int, int]]] = {}
    for place, slot in zip(places(slots), slots, strict=True):
        sizes.setdefault(place, set()).add(_widths(slot))
    if any(len(found) > 1 for found in sizes.values()):
        raise ArtifactError("KV slots of different sizes share a block; compile the model again")
    return tuple(_group_of(found) for found in members)


def places(slots: Iterable[KVSlot]) -> list[int]:
    """The place of each slot within a block: slots of a group are counted from 0 on."""
    seen: Counter[int] = Counter()
    found = []
    for slot in slots:
        found.append(seen[slot.group])
        seen[slot.group] += 1
    return found


def _widths(slot: KVSlot) -> tuple[int, int]:
    """Elements of a token's keys and of its values."""
    return slot.num_kv_heads * slot.head_dim, slot.num_kv_heads * slot.v_head_dim


def _group_of(slots: Sequence[KVSlot]) -> BlockGroup:
    return BlockGroup(
        _widest([slot.window for slot in slots]), _widest([slot.chunk for slot in slots])
    )


def _widest(spans: Sequence[int | None]) -> int | None:
    known = [span for span in spans if span is not None]
    return max(known) if known and len(known) == len(spans) else None


def most_blocks(
    groups: Iterable[BlockGroup], num_tokens: int, step_tokens: int, block_size: int
) -> int:
    """The most blocks of all groups that a sequence holds until it has ``num_tokens`` tokens."""
    return sum(group.most_blocks(num_tokens, step_tokens, block_size) for group in groups)


def longest_sequence(
    groups: Sequence[BlockGroup], num_blocks: int, step_tokens: int, block_size: int, limit: int
) -> int:
    """The most tokens, up to ``limit``, of a sequence that ``num_blocks`` blocks hold alone."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle, step_tokens, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
