"""How much of a context is there already, and in which blocks, given the blocks of all groups.

A group that keeps all of the context needs every block up to where the hit ends. A group with a
window needs those that the token behind the hit sees, and nothing before: the rule of vLLM's
hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.runtime.block_groups import BlockGroup

# Whether block number ``index`` of a context is there for a group.
IsThere = Callable[[int, int], bool]


class HostBlock(NamedTuple):
    """Block number ``place`` of a hit, in host memory, where it is known by ``key``."""

    group: int
    place: int
    key: bytes


@dataclass(frozen=True)
class PrefixHit:
    """The first ``num_blocks`` blocks of a context, as each group has them.

    ``tables`` has, for each group, the block ids that may be shared. The null block stands for one
    that nobody needs any more, and for one of ``loads``.
    """

    num_blocks: int
    tables: tuple[tuple[int, ...], ...]
    loads: tuple[HostBlock, ...] = ()

    @property
    def block_ids(self) -> frozenset[int]:
        """The blocks that may be shared, and the null block."""
        return frozenset(block_id for table in self.tables for block_id in table)

    @property
    def num_loaded(self) -> int:
        """Blocks of the context of which some group's part has to be loaded."""
        return len({load.place for load in self.loads})

    @property
    def num_shared(self) -> int:
        """Blocks of the context, from the first on, of which nothing has to be loaded."""
        return min((load.place for load in self.loads), default=self.num_blocks)


def group_key(key: bytes, group: int) -> bytes:
    """What a block is known by in a group, given the key of its tokens and all before them."""
    return key + bytes((group,)) if group else key


def hit_length(
    groups: Sequence[BlockGroup], num_blocks: int, block_size: int, is_there: IsThere
) -> int:
    """The largest number of leading blocks, up to ``num_blocks``, that need not be computed."""
    length = num_blocks
    for number, group in enumerate(groups):
        if group.is_full:
            missing = (i for i in range(length) if not is_there(number, i))
            length = next(missing, length)
    before = None
    while length != before:  # what is shorter for one group may end elsewhere for another
        before = length
        for number, group in enumerate(groups):
            if not group.is_full:
                length = _windowed_length(group, number, length, block_size, is_there)
    return length


def _windowed_length(
    group: BlockGroup, number: int, length: int, block_size: int, is_there: IsThere
) -> int:
    index = length - 1
    while index >= group.first_needed(length * block_size) // block_size:
        if not is_there(number, index):
            length = index
        index -= 1
    return length
