"""A plan as arrays, value by value."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import torch

from octavo.runtime.batch import BatchBuilder
from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import PromptRows, ScheduledSequence, StepPlan


def sequence(
    name: str, tokens: list[int], start: int, blocks: list[int], is_sampled: bool = True
) -> ScheduledSequence:
    """The last of a request's tokens, from ``start`` on."""
    request = Request(name, [0] * start + tokens, SamplingParams(), max_model_len=100)
    return ScheduledSequence(request, start, len(tokens), (array("i", blocks),), is_sampled)


PLAN = StepPlan(
    (
        sequence("decode", [50], 5, [3, 7]),
        sequence("chunk", [60, 61, 62], 2, [1, 2, 9], is_sampled=False),
        sequence("prompt", [70, 71], 0, [5]),
    )
)


def test_every_array() -> None:
    batch = BatchBuilder(4).build(PLAN)
    assert batch.ids.tolist() == [50, 60, 61, 62, 70, 71]
    assert batch.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [29, 6, 7, 8, 20, 21]
    assert batch.block_table.tolist() == [[3, 7, 0], [1, 2, 9], [5, 0, 0]]
    assert batch.query_start.tolist() == [0, 1, 4, 6]
    assert batch.seq_lens.tolist() == [6, 5, 2]
    assert batch.logit_rows.tolist() == [0, 5]


def test_rows_of_prompt_tokens_follow_those_that_are_sampled() -> None:
    chunk, prompt = PLAN.sequences[1].request, PLAN.sequences[2].request
    rows = (PromptRows(1, chunk, 3, 5), PromptRows(2, prompt, 0, 1))
    batch = BatchBuilder(4).build(replace(PLAN, prompt_rows=rows))
    assert batch.logit_rows.tolist() == [0, 5, 2, 3, 4]


def test_the_types_are_those_of_the_contract() -> None:
    tensors = BatchBuilder(4).build(PLAN).to_tensors(torch.device("cpu"))
    wide, narrow = torch.int64, torch.int32
    assert [t.dtype for t in tensors] == [wide, wide, wide, narrow, narrow, narrow, wide]
    assert all(t.is_contiguous() for t in tensors)


def test_a_step_without_a_sampled_row_has_no_logit_rows() -> None:
    plan = StepPlan((sequence("a", [1, 2], 0, [1], is_sampled=False),))
    assert BatchBuilder(4).build(plan).logit_rows.tolist() == []


def test_ids_that_are_still_sampled_have_a_source_row() -> None:
    pending = sequence("pending", [99], 3, [4])._replace(source_row=6)
    batch = BatchBuilder(4).build(StepPlan((*PLAN.sequences, pending)))
    assert batch.source_rows is not None
    assert batch.source_rows.tolist() == [-1, -1, -1, -1, -1, -1, 6]
    assert batch.ids.tolist() == [50, 60, 61, 62, 70, 71, 0]
    decodes = BatchBuilder(4).build(StepPlan((PLAN.sequences[0], pending)))
    assert decodes.source_rows is not None
    assert decodes.source_rows.tolist() == [-1, 6]
    assert (decodes.ids.tolist(), decodes.positions.tolist()) == ([50, 0], [5, 3])


def test_a_builder_follows_tables_that_grow_end_and_are_made_anew() -> None:
    builder, rng = BatchBuilder(2), random.Random(0)
    tables: dict[str, ScheduledSequence] = {}
    for step in range(300):
        name = str(rng.randrange(step // 4 + 1))
        if name not in tables or rng.random() < 0.2:
            tables[name] = sequence(name, [1], 1, [])
        table = tables[name].tables[0]
        table.extend(rng.randrange(1, 99) for _ in range(rng.randint(1, 40)))
        ready = [name for name, item in tables.items() if item.tables[0]]
        chosen = [tables[name] for name in rng.sample(ready, rng.randint(1, len(ready)))]
        built = builder.build(StepPlan(tuple(chosen))).block_table
        for row, item in zip(built.tolist(), chosen, strict=True):
            used = len(item.tables[0])
            assert row == [*item.tables[0], *[0] * (len(row) - used)]


def test_several_groups_have_a_row_each_and_follow_their_windows() -> None:
    builder = BatchBuilder(4, (FULL, BlockGroup(window=6)))
    request = Request("a", [5] * 20, SamplingParams(), max_model_len=100)
    full, windowed = array("i", [1, 2, 3]), array("i", [7, 8])
    step = ScheduledSequence(request, 4, 4, (full, windowed), True)
    batch = builder.build(StepPlan((step,)))
    assert batch.slot_mapping.tolist() == [[8, 9, 10, 11], [32, 33, 34, 35]]
    assert batch.block_table.tolist() == [[[1, 2, 3]], [[7, 8, 0]]]
    assert builder.build(StepPlan((step,))).block_table is batch.block_table
    windowed[0] = 0  # what lies behind the window is given back when the table grows
    windowed.append(9)
    batch = builder.build(StepPlan((step._replace(start=9, num_tokens=1),)))
    assert batch.slot_mapping.tolist() == [[13], [37]]
    assert batch.block_table.tolist() == [[[1, 2, 3]], [[0, 8, 9]]]
