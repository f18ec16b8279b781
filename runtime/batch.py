"""A step plan as the arrays that a program takes, see "The step" in docs/architecture.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.block_tables import BlockTables
from octavo.runtime.scheduler import ScheduledSequence, StepPlan


@dataclass(frozen=True)
class Batch:
    """Inputs of a step: T tokens of S sequences laid end to end, R of them with logits.

    With more than one block group, ``slot_mapping`` and ``block_table`` have a row for each first.
    ``source_rows`` None means that all ids are known. Else the id of token ``t`` is what row
    ``source_rows[t]`` of the step before samples, where that is not negative. Before all else,
    blocks ``saves[0]`` are copied to slots of host memory ``saves[1]``, then slots ``loads[0]`` to
    blocks ``loads[1]``; None means nothing.
    """

    ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T] or [G, T]
    block_table: NDArray[np.int32]  # [S, B] or [G, S, B]
    query_start: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    logit_rows: NDArray[np.int64]  # [R]
    source_rows: NDArray[np.int64] | None = None  # [T]
    saves: NDArray[np.int64] | None = None  # [2, C]
    loads: NDArray[np.int64] | None = None  # [2, C]

    def to_tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """The seven inputs in the order of the program's parameters."""
        arrays = (
            self.ids,
            self.positions,
            self.slot_mapping,
            self.block_table,
            self.query_start,
            self.seq_lens,
            self.logit_rows,
        )
        return tuple(torch.from_numpy(a).to(device, non_blocking=True) for a in arrays)


class BatchBuilder:
    """Lays the sequences of plans end to end. It keeps their block tables from step to step."""

    def __init__(self, block_size: int, groups: Sequence[BlockGroup] = (FULL,)) -> None:
        self._block_size = block_size
        self._tables = BlockTables(groups)

    def build(self, plan: StepPlan) -> Batch:
        """The arrays of a plan, made before the next plan is."""
        sequences = plan.sequences
        _, starts_, lengths_, tables, sampled_, sources = zip(*sequences, strict=True)
        starts = np.array(starts_, dtype=np.int64)
        lengths = np.array(lengths_, dtype=np.int64)
        num_seqs = len(sequences)
        query_start = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        num_tokens = int(query_start[-1])
        block_table = self._tables.gather(tables)
        if num_tokens == num_seqs:
            owner, positions = np.arange(num_seqs), starts
        else:
            owner = np.repeat(np.arange(num_seqs), lengths)  # token -> its sequence
            positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lengths)
        block_of = block_table[..., owner, positions // self._block_size].astype(np.int64)
        return Batch(
            ids=_ids(sequences, num_tokens),
            positions=positions,
            slot_mapping=block_of * self._block_size + positions % self._block_size,
            block_table=block_table,
            query_start=query_start.astype(np.int32),
            seq_lens=(starts + lengths).astype(np.int32),
            logit_rows=_logit_rows(plan, query_start, np.array(sampled_, dtype=bool)),
            source_rows=_source_rows(sources, query_start),
            saves=_copies([(save.block_id, save.slot) for save in plan.saves]),
            loads=_copies(plan.loads),
        )


def _copies(pairs: Sequence[tuple[int, int]]) -> NDArray[np.int64] | None:
    """Sources and goals, ``[2, C]``."""
    return np.array(pairs, dtype=np.int64).T.copy() if pairs else None


def _ids(sequences: tuple[ScheduledSequence, ...], num_tokens: int) -> NDArray[np.int64]:
    """Ids of all tokens; 0 for one that is still being sampled."""
    if num_tokens == len(sequences):
        one_each = [
            0 if source is not None else r.token_ids[start] for r, start, *_, source in sequences
        ]
        return np.array(one_each, dtype=np.int64)
    pieces = (
        (0,) if source is not None else request.token_ids[start : start + length]
        for request, start, length, _, _, source in sequences
    )
    return np.fromiter(chain.from_iterable(pieces), np.int64, count=num_tokens)


def _logit_rows(
    plan: StepPlan, query_start: NDArray[np.int64], is_sampled: NDArray[np.bool_]
) -> NDArray[np.int64]:
    last = query_start[1:][is_sampled] - 1
    if not plan.prompt_rows:
        return last
    tokens = [
        np.arange(start, stop) - plan.sequences[place].start + query_start[place]
        for place, _, start, stop in plan.prompt_rows
    ]
    return np.concatenate([last, *tokens])


def _source_rows(
    sources: tuple[int | None, ...], query_start: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    pending = {i: source for i, source in enumerate(sources) if source is not None}
    if not pending:
        return None
    rows = np.full(int(query_start[-1]), -1, dtype=np.int64)
    rows[query_start[list(pending)]] = list(pending.values())
    return rows
