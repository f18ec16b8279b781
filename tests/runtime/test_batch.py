"""A plan as arrays, value by value."""

from __future__ import annotations

from array import array

import torch

from octavo.runtime.batch import build_batch
from octavo.runtime.scheduler import ScheduledSequence, StepPlan

PLAN = StepPlan(
    (
        ScheduledSequence("decode", [50], 5, array("i", [3, 7]), True),
        ScheduledSequence("chunk", [60, 61, 62], 2, array("i", [1, 2, 9]), False),
        ScheduledSequence("prompt", [70, 71], 0, array("i", [5]), True),
    )
)


def test_every_array() -> None:
    batch = build_batch(PLAN, block_size=4)
    assert batch.ids.tolist() == [50, 60, 61, 62, 70, 71]
    assert batch.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [29, 6, 7, 8, 20, 21]
    assert batch.block_table.tolist() == [[3, 7, 0], [1, 2, 9], [5, 0, 0]]
    assert batch.query_start.tolist() == [0, 1, 4, 6]
    assert batch.seq_lens.tolist() == [6, 5, 2]
    assert batch.logit_rows.tolist() == [0, 5]


def test_the_types_are_those_of_the_contract() -> None:
    tensors = build_batch(PLAN, block_size=4).to_tensors(torch.device("cpu"))
    wide, narrow = torch.int64, torch.int32
    assert [t.dtype for t in tensors] == [wide, wide, wide, narrow, narrow, narrow, wide]
    assert all(t.is_contiguous() for t in tensors)


def test_a_step_without_a_sampled_row_has_no_logit_rows() -> None:
    plan = StepPlan((ScheduledSequence("a", [1, 2], 0, array("i", [1]), False),))
    assert build_batch(plan, block_size=4).logit_rows.tolist() == []
