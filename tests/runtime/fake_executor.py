"""A device for tests of the engine: it keeps in each slot a hash of all that stands before it.

So what a slot holds depends, as K and V do, on what the step read through the block table: a wrong
slot, a stale or shared block or a lost token gives other answers from there on. All slots are read
before any is written, so that nothing may rest on the order within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.runtime.batch import Batch
from octavo.runtime.executor import with_known_ids
from octavo.runtime.sampler import SampledToken, SampleRow

VOCAB_SIZE = 50
POISON = 0  # a token whose presence spoils the logits
_ROOT, _MODULUS = 17, 2**61 - 1


def extend(state: int, token: int) -> int:
    """The hash of a context and one more token."""
    return (state * 1000003 + token + 1) % _MODULUS


def next_token(state: int) -> int:
    return 1 + state % (VOCAB_SIZE - 1)


def expected_answer(prompt: Sequence[int], count: int, ends: Sequence[int]) -> list[int]:
    """What the model says after a prompt, without blocks or steps."""
    state, answer = _ROOT, []
    for token in prompt:
        state = extend(state, token)
    while len(answer) < count and not (answer and answer[-1] in ends):
        answer.append(next_token(state))
        state = extend(state, answer[-1])
    return answer


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

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, bool]] = {}  # hash, and whether a poison stands before
        self.host: dict[int, list[tuple[int, bool]]] = {}  # by slots of host memory
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
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        assert min(slots) >= self.block_size, "a token is written to the null block"
        is_garbage = self.launch_fault is not None or self.result_fault is not None
        self._copy(batch, is_garbage)
        states = [state for row in range(len(batch.seq_lens)) for state in self._row(batch, row)]
        launch_fault, self.launch_fault = self.launch_fault, None
        result_fault, self.result_fault = self.result_fault, None
        written = [(-1, False)] * len(slots) if is_garbage else states
        self.slots.update(zip(slots, written, strict=True))
        if launch_fault is not None:
            raise launch_fault
        self.num_tokens_computed += len(slots)
        tokens = [self._token(states[row]) for row in batch.logit_rows.tolist()]
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
            self.host[slot] = [(-1, False)] * size if is_garbage else content
        for slot, block_id in zip(sources, loaded, strict=True):
            content = [(-1, False)] * size if is_garbage else self.host[slot]
            self.slots.update({block_id * size + i: state for i, state in enumerate(content)})

    def _row(self, batch: Batch, row: int) -> list[tuple[int, bool]]:
        first, last = batch.query_start[row : row + 2].tolist()
        position = int(batch.positions[first])
        state = (_ROOT, False)
        if position > 0:
            block_id = int(batch.block_table[row, (position - 1) // self.block_size])
            state = self.slots[block_id * self.block_size + (position - 1) % self.block_size]
        states = []
        for token in batch.ids[first:last].tolist():
            state = (extend(state[0], token), state[1] or token == POISON)
            states.append(state)
        return states

    def _token(self, state: tuple[int, bool]) -> SampledToken:
        return SampledToken(next_token(state[0]), None, "spoiled" if state[1] else None)
