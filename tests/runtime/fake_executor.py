"""A device for tests of the engine: it keeps in each slot a hash of all that stands before it.

So what a slot holds depends, as K and V do, on what the step read through the block table: a wrong
slot, a stale or shared block or a lost token gives other answers from there on. All slots are read
before any is written, so that nothing may rest on the order within a step.

Each block group has a hash of its own, so that a block of one is of no use to another. Of a group
with a window all that a token sees has to be there, and nothing before it is read. The hash of a
group begins anew where a token sees nothing before itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from octavo.runtime.batch import Batch
from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.executor import with_known_ids
from octavo.runtime.sampler import SampledToken, SampleRow

VOCAB_SIZE = 50
POISON = 0  # a token whose presence spoils the logits
_ROOT, _MODULUS = 17, 2**61 - 1


class State(NamedTuple):
    """What a slot holds: the hash of a context, its last token, and whether a poison is in it."""

    hash: int
    token: int = -1
    is_poisoned: bool = False


GARBAGE = State(-1)


def extend(state: int, token: int) -> int:
    """The hash of a context and one more token."""
    return (state * 1000003 + token + 1) % _MODULUS


def next_token(state: int) -> int:
    return 1 + state % (VOCAB_SIZE - 1)


def expected_answer(
    prompt: Sequence[int],
    count: int,
    ends: Sequence[int],
    groups: Sequence[BlockGroup] = (FULL,),
) -> list[int]:
    """What the model says after a prompt, without blocks or steps."""
    tokens = list(prompt)
    states = [State(_ROOT)] * len(groups)
    for position in range(len(prompt) + count - 1):
        if position >= len(prompt):
            tokens.append(next_token(sum(state.hash for state in states)))
            if tokens[-1] in ends:
                return tokens[len(prompt) :]
        states = [
            _after(group, number, position, state, tokens[position])
            for number, (group, state) in enumerate(zip(groups, states, strict=True))
        ]
    return [*tokens, next_token(sum(state.hash for state in states))][len(prompt) :]


def _after(group: BlockGroup, number: int, position: int, before: State, token: int) -> State:
    """The state of a group after one more token, at a position."""
    if group.first_needed(position) == position:
        before = State(_ROOT + number)
    return State(extend(before.hash, token), token, before.is_poisoned or token == POISON)


@dataclass
class FakeStep:
    """A step that ran; ``fault`` is raised when its tokens are asked for."""

    tokens: list[SampledToken]
    fault: BaseException | None = None

    def result(self) -> list[SampledToken]:
        if self.fault is not None:
            raise self.fault
        return self.tokens


class FakeExecutor:
    """``launch_fault`` and ``result_fault`` are raised by the next step, all of whose writes are
    garbage; ``early_interrupt`` by the next launch before it ran, ``interrupt`` after."""

    def __init__(self, block_size: int, groups: Sequence[BlockGroup] = (FULL,)) -> None:
        self.block_size = block_size
        self.groups = groups
        self.slots: dict[int, State] = {}
        self.host: dict[int, list[State]] = {}  # by slots of host memory
        self.num_copies = 0
        self.launch_fault: BaseException | None = None
        self.result_fault: BaseException | None = None
        self.early_interrupt: BaseException | None = None
        self.interrupt: BaseException | None = None
        self.num_tokens_computed = 0
        self.num_launched_tokens = 0
        self._sampled = np.empty(0, dtype=np.int64)

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> FakeStep:
        if self.early_interrupt is not None:
            raise self.early_interrupt
        batch = with_known_ids(batch, self._sampled)
        self.num_launched_tokens = len(batch.ids)
        slots = batch.slot_mapping.flatten().tolist()
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        assert min(slots) >= self.block_size, "a token is written to the null block"
        is_garbage = self.launch_fault is not None or self.result_fault is not None
        self._copy(batch, is_garbage)
        states = [self._states(batch, group) for group in range(len(self.groups))]
        launch_fault, self.launch_fault = self.launch_fault, None
        result_fault, self.result_fault = self.result_fault, None
        written = [GARBAGE if is_garbage else state for group in states for state in group]
        self.slots.update(zip(slots, written, strict=True))
        if launch_fault is not None:
            raise launch_fault
        self.num_tokens_computed += len(batch.ids)
        tokens = [self._token([s[row] for s in states]) for row in batch.logit_rows.tolist()]
        assert len(tokens) == len(rows)
        self._sampled = np.array([token.token_id for token in tokens], dtype=np.int64)
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt
        return FakeStep(tokens, result_fault)

    def _copy(self, batch: Batch, is_garbage: bool) -> None:
        size = self.block_size
        (blocks, goals), (sources, loaded) = (
            ([], []) if pairs is None else pairs.tolist() for pairs in (batch.saves, batch.loads)
        )
        assert len(set(goals)) == len(goals), "two blocks are saved to one slot"
        assert len(set(loaded)) == len(loaded), "two slots are loaded to one block"
        assert 0 not in blocks + loaded, "the null block is copied"
        self.num_copies += len(blocks) + len(loaded)
        for block_id, slot in zip(blocks, goals, strict=True):
            content = [self.slots[block_id * size + i] for i in range(size)]
            self.host[slot] = [GARBAGE] * size if is_garbage else content
        for slot, block_id in zip(sources, loaded, strict=True):
            content = [GARBAGE] * size if is_garbage else self.host[slot]
            self.slots.update({block_id * size + i: state for i, state in enumerate(content)})

    def _states(self, batch: Batch, group: int) -> list[State]:
        """What a group's slots are to hold of each token of the step."""
        tables = batch.block_table if len(self.groups) > 1 else batch.block_table[None]
        states = []
        for row, table in enumerate(tables[group].tolist()):
            first, last = batch.query_start[row : row + 2].tolist()
            start = int(batch.positions[first])
            state = self._before(group, start, table)
            for position, token in enumerate(batch.ids[first:last].tolist(), start):
                state = _after(self.groups[group], group, position, state, token)
                states.append(state)
        return states

    def _before(self, group: int, position: int, table: Sequence[int]) -> State:
        """What stands before a position; garbage, unless all that is seen of it is in order."""
        size, oldest = self.block_size, self.groups[group].first_needed(position)
        if oldest == position:
            return State(_ROOT)
        seen = [self.slots[table[p // size] * size + p % size] for p in range(oldest, position)]
        for before, state in pairwise(seen):
            if extend(before.hash, state.token) != state.hash:
                return GARBAGE
        return seen[-1]

    def _token(self, states: Sequence[State]) -> SampledToken:
        is_poisoned = any(state.is_poisoned for state in states)
        token = next_token(sum(state.hash for state in states))
        return SampledToken(token, None, "spoiled" if is_poisoned else None)
