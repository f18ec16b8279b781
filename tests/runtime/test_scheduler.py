"""Who runs when: literal plans."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan


def make(
    *,
    num_blocks: int = 101,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 16,
    chunk: int = 0,
    watermark: float = 0.0,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, chunk, watermark)
    return Scheduler(config, BlockManager(num_blocks, block_size))


def add(scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(name, range(prompt_len), params, max_model_len=1000)
    scheduler.add(request)
    return request


def run(scheduler: Scheduler) -> tuple[list[tuple[str, int, int, bool]], StepPlan]:
    """One step with token 7 for everybody: (request, start, tokens, sampled), and the plan."""
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.update(plan, sevens(plan))
    scheduler.blocks.check()
    return rows_of(plan), plan


def sevens(plan: StepPlan) -> list[int | None]:
    return [7 for sequence in plan.sequences if sequence.is_sampled]


def rows_of(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.num_tokens, s.is_sampled) for s in plan.sequences]


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def steps(scheduler: Scheduler, count: int) -> list[list[tuple[str, int, int, bool]]]:
    return [run(scheduler)[0] for _ in range(count)]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert make().schedule() == StepPlan(())


def test_prompts_share_the_budget_first_come_first_served() -> None:
    scheduler = make(budget=16)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    add(scheduler, "c", 3)
    assert steps(scheduler, 3) == [
        [("a", 0, 10, True), ("b", 0, 6, False)],
        [("a", 10, 1, True), ("b", 6, 4, True), ("c", 0, 3, True)],
        [("a", 11, 1, True), ("b", 10, 1, True), ("c", 3, 1, True)],
    ]


def test_decodes_come_before_a_prefill_admitted_earlier() -> None:
    scheduler = make(budget=8)
    add(scheduler, "long", 20)
    assert steps(scheduler, 1) == [[("long", 0, 8, False)]]
    scheduler.config = SchedulerConfig(8, 16, 6, 0.0)
    add(scheduler, "short", 3)
    assert steps(scheduler, 2) == [
        [("long", 8, 6, False), ("short", 0, 3, True)],
        [("short", 3, 1, True), ("long", 14, 6, True)],
    ]


@pytest.mark.parametrize(("chunk", "expected"), [(7, [7, 7, 7, 2]), (64, [23]), (0, [23])])
def test_a_long_prompt_goes_in_chunks(chunk: int, expected: list[int]) -> None:
    scheduler = make(budget=64, chunk=chunk)
    add(scheduler, "a", 23)
    rows = [row for step in steps(scheduler, len(expected)) for row in step]
    assert [length for _, _, length, _ in rows] == expected
    assert [is_sampled for *_, is_sampled in rows] == [False] * (len(expected) - 1) + [True]


def test_the_budget_is_never_exceeded_by_decodes() -> None:
    scheduler = make(budget=3)
    for name in "abcde":
        add(scheduler, name, 1)
    assert steps(scheduler, 2) == [
        [("a", 0, 1, True), ("b", 0, 1, True), ("c", 0, 1, True)],
        [("a", 1, 1, True), ("b", 1, 1, True), ("c", 1, 1, True)],
    ]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make(max_num_seqs=2)
    a = add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    add(scheduler, "c", 2)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["a", "b"]
    scheduler.finish(a)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["b", "c"]


def test_nobody_overtakes_the_first_that_waits_for_memory() -> None:
    scheduler = make(num_blocks=6, block_size=4, budget=64)
    a = add(scheduler, "a", 12)
    add(scheduler, "b", 12)
    add(scheduler, "c", 1)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["a"]
    scheduler.finish(a)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["b", "c"]


def test_admission_leaves_the_watermark_free_unless_nobody_runs() -> None:
    scheduler = make(num_blocks=11, block_size=4, budget=64, watermark=0.2)
    add(scheduler, "a", 20)  # 5 of 10 blocks
    add(scheduler, "b", 16)  # 4 more would leave 1, the watermark is 2
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["a"]
    alone = make(num_blocks=11, block_size=4, budget=64, watermark=0.2)
    add(alone, "a", 40, max_tokens=1)
    assert [row[0] for row in steps(alone, 1)[0]] == ["a"]


def test_the_last_admitted_yields_and_returns_to_the_front() -> None:
    scheduler = make(num_blocks=4, block_size=4, budget=64)
    add(scheduler, "a", 4)
    b = add(scheduler, "b", 4)
    add(scheduler, "c", 4)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["a", "b", "c"]
    rows, plan = run(scheduler)  # all three need a second block
    assert rows == [("a", 4, 1, True)]
    assert names(plan.preempted) == ["c", "b"]
    assert names(scheduler.waiting) == ["b", "c"]
    assert b.status is RequestStatus.PREEMPTED
    assert b.token_ids == [0, 1, 2, 3, 7]
    assert b.num_computed_tokens == 0


def test_a_preempted_request_computes_prompt_and_output_again() -> None:
    scheduler = make(num_blocks=4, block_size=4, budget=64)
    a = add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    steps(scheduler, 1)
    rows, plan = run(scheduler)  # a takes the third block, b finds none and yields
    assert names(plan.preempted) == ["b"]
    assert rows == [("a", 4, 1, True)]
    scheduler.finish(a)
    assert steps(scheduler, 1) == [[("b", 0, 5, True)]]


def test_the_victim_is_the_last_admitted_not_the_one_in_need() -> None:
    scheduler = make(num_blocks=7, block_size=4, budget=64)
    add(scheduler, "a", 8)
    add(scheduler, "b", 7)
    add(scheduler, "c", 8)
    assert [row[0] for row in steps(scheduler, 1)[0]] == ["a", "b", "c"]
    rows, plan = run(scheduler)  # a needs a block and takes c's; b fits; c is out
    assert rows == [("a", 8, 1, True), ("b", 7, 1, True)]
    assert names(plan.preempted) == ["c"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make(num_blocks=4, block_size=4, budget=64, max_num_seqs=2)
    add(scheduler, "a", 4)
    add(scheduler, "b", 8, max_tokens=4)
    add(scheduler, "c", 1)
    steps(scheduler, 1)
    rows, plan = run(scheduler)
    assert names(plan.preempted) == ["b"]
    assert rows == [("a", 4, 1, True)]


def test_a_request_that_could_never_fit_is_refused_at_once() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match="need 4 KV blocks, there are 3"):
        add(scheduler, "a", 10, max_tokens=4)
    add(scheduler, "b", 10, max_tokens=3)  # 13 tokens, the last of which is never fed back
    assert scheduler.has_unfinished


def test_a_step_that_failed_can_be_planned_again() -> None:
    scheduler = make(budget=16)
    add(scheduler, "a", 5)
    assert scheduler.schedule() == scheduler.schedule()
    scheduler.blocks.check()


def test_a_request_that_ended_while_its_step_ran_is_left_alone() -> None:
    scheduler = make()
    a = add(scheduler, "a", 5)
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.finish(a)
    assert scheduler.update(plan, [7]) == [False]
    assert a.num_output_tokens == 0
    assert not scheduler.has_unfinished
    assert scheduler.blocks.num_free_blocks == 100


def test_a_waiting_request_can_be_taken_out() -> None:
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 5)
    b = add(scheduler, "b", 5)
    steps(scheduler, 1)
    scheduler.finish(b)
    assert list(scheduler.waiting) == []


def test_the_next_step_runs_the_token_that_is_being_sampled() -> None:
    scheduler = make(budget=16)
    a = add(scheduler, "a", 5)
    add(scheduler, "b", 3)
    first = scheduler.schedule()
    scheduler.begin(first)
    second = scheduler.schedule()
    assert rows_of(second) == [("a", 5, 1, True), ("b", 3, 1, True)]
    assert [s.source_row for s in second.sequences] == [0, 1]
    assert [len(s.tables[0]) for s in second.sequences] == [2, 1]
    scheduler.begin(second)
    assert scheduler.update(first, [7, 8]) == [True, True]
    assert a.token_ids[5:] == [7]
    third = scheduler.schedule()
    assert rows_of(third) == [("a", 6, 1, True), ("b", 4, 1, True)]
    assert [s.source_row for s in third.sequences] == [0, 1]


def test_a_source_row_counts_sampled_rows_only() -> None:
    scheduler = make(budget=6)
    add(scheduler, "a", 1)
    steps(scheduler, 1)
    add(scheduler, "long", 9)
    first = scheduler.schedule()
    assert rows_of(first) == [("a", 1, 1, True), ("long", 0, 5, False)]
    scheduler.begin(first)
    second = scheduler.schedule()
    assert rows_of(second) == [("a", 2, 1, True), ("long", 5, 4, True)]
    assert [s.source_row for s in second.sequences] == [0, None]


def test_no_row_is_planned_beyond_max_tokens() -> None:
    scheduler = make()
    a = add(scheduler, "a", 5, max_tokens=2)
    first = scheduler.schedule()
    scheduler.begin(first)
    second = scheduler.schedule()
    scheduler.begin(second)
    scheduler.update(first, [7])
    assert scheduler.schedule() == StepPlan(())
    scheduler.update(second, [8])
    assert a.output_token_ids == [7, 8]
    assert a.is_at_limit


def test_a_row_computed_for_nothing_is_dropped() -> None:
    scheduler = make()
    a, b = add(scheduler, "a", 5), add(scheduler, "b", 5)
    first = scheduler.schedule()
    scheduler.begin(first)
    second = scheduler.schedule()
    scheduler.begin(second)
    scheduler.update(first, [7, 7])
    scheduler.finish(a)  # its first token was its end
    scheduler.blocks.check()
    third = scheduler.schedule()
    assert rows_of(third) == [("b", 6, 1, True)]
    assert third.sequences[0].source_row == 1
    scheduler.begin(third)
    assert scheduler.update(second, [8, 9]) == [False, True]
    assert (a.output_token_ids, b.output_token_ids) == ([7], [7, 9])


def test_who_is_preempted_still_gets_its_pending_token() -> None:
    scheduler = make(num_blocks=4, block_size=4, budget=64)
    add(scheduler, "a", 4)
    b = add(scheduler, "b", 4)
    first = scheduler.schedule()
    scheduler.begin(first)
    second = scheduler.schedule()
    assert names(second.preempted) == ["b"]
    assert scheduler.schedule().preempted == ()  # planned again: b waits until its token is there
    assert names(scheduler.running.values()) == ["a"]
    scheduler.begin(second)
    assert scheduler.update(first, [7, 8]) == [True, True]
    assert (b.token_ids, b.num_computed_tokens, b.num_pending) == ([0, 1, 2, 3, 8], 0, 0)


def test_a_step_that_ran_twice_counts_once() -> None:
    scheduler = make()
    a = add(scheduler, "a", 5)
    first, again = scheduler.schedule(), scheduler.schedule()  # interrupted before it was begun
    scheduler.begin(again)
    assert scheduler.update(first, [7]) == [True]
    assert scheduler.update(again, [7]) == [False]
    assert (a.output_token_ids, a.num_pending) == ([7], 0)
    assert rows_of(scheduler.schedule()) == [("a", 5, 1, True)]
