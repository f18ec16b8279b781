"""A step plan as the arrays that a program takes, see "The step" in docs/architecture.md."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.block_manager import NULL_BLOCK
from octavo.runtime.scheduler import StepPlan


@dataclass(frozen=True)
class Batch:
    """Inputs of a step: T tokens of S sequences laid end to end, R of them with logits."""

    ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    block_table: NDArray[np.int32]  # [S, B]
    query_start: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    logit_rows: NDArray[np.int64]  # [R]

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


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay the sequences of a plan end to end."""
    sequences = plan.sequences
    lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    query_start = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    num_tokens = int(query_start[-1])

    owner = np.repeat(np.arange(len(sequences)), lengths)  # token -> its sequence
    positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lengths)
    block_table = _block_table(plan)
    block_of = block_table[owner, positions // block_size].astype(np.int64)
    is_sampled = np.array([s.is_sampled for s in sequences], dtype=bool)
    return Batch(
        ids=np.fromiter(
            chain.from_iterable(s.token_ids for s in sequences), np.int64, count=num_tokens
        ),
        positions=positions,
        slot_mapping=block_of * block_size + positions % block_size,
        block_table=block_table,
        query_start=query_start.astype(np.int32),
        seq_lens=(starts + lengths).astype(np.int32),
        logit_rows=query_start[1:][is_sampled] - 1,
    )


def _block_table(plan: StepPlan) -> NDArray[np.int32]:
    width = max(len(s.block_ids) for s in plan.sequences)
    table = np.full((len(plan.sequences), width), NULL_BLOCK, dtype=np.int32)
    for row, sequence in zip(table, plan.sequences, strict=True):
        row[: len(sequence.block_ids)] = sequence.block_ids
    return table
