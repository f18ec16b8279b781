"""What the scheduler computes when the prefix cache has some of it: literal plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.prefix_cache import root_key
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan

Rows = list[tuple[str, int, int, bool]]


def make(*, num_blocks: int = 101, budget: int = 64, max_num_seqs: int = 8) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, watermark=0.0)
    return Scheduler(config, BlockManager(num_blocks, 4, enable_prefix_caching=True))


def add(
    scheduler: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 8, salt: str = "none"
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    root = root_key("model", cache_salt=salt)
    request = Request(name, prompt, params, max_model_len=1000, root_key=root)
    scheduler.add(request)
    return request


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.blocks.check()
    return plan


def take(scheduler: Scheduler, plan: StepPlan, token: int | None = 7) -> None:
    scheduler.update(plan, [token for sequence in plan.sequences if sequence.is_sampled])
    scheduler.blocks.check()


def rows_of(plan: StepPlan) -> Rows:
    return [(s.request.request_id, s.start, s.num_tokens, s.is_sampled) for s in plan.sequences]


def step(scheduler: Scheduler) -> Rows:
    plan = launch(scheduler)
    take(scheduler, plan)
    return rows_of(plan)


@pytest.mark.parametrize(
    ("length", "computed_from"), [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)]
)
def test_the_last_tokens_block_is_always_computed(length: int, computed_from: int) -> None:
    scheduler = make()
    first = add(scheduler, "first", range(length))
    assert step(scheduler) == [("first", 0, length, True)]
    scheduler.finish(first)
    second = add(scheduler, "second", range(length))
    assert step(scheduler) == [("second", computed_from, length - computed_from, True)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, computed_from)
    assert (scheduler.sharing.num_queries, scheduler.sharing.num_hits) == (
        2 * length,
        computed_from,
    )


def test_an_answer_is_the_prefix_of_the_next_turn() -> None:
    scheduler = make()
    first = add(scheduler, "first", range(6), max_tokens=7)
    for _ in range(7):
        step(scheduler)
    assert first.token_ids == [0, 1, 2, 3, 4, 5, *[7] * 7]
    scheduler.finish(first)  # 12 tokens are in the cache: the last was never fed back
    add(scheduler, "second", [*first.token_ids, 9])
    assert step(scheduler) == [("second", 12, 2, True)]


def test_who_differs_before_shares_nothing_behind() -> None:
    scheduler = make()
    add(scheduler, "a", range(12))
    step(scheduler)
    add(scheduler, "b", [0, 1, 2, 9, *range(4, 12)])
    assert ("b", 0, 12, True) in step(scheduler)


def test_salts_part_tenants() -> None:
    scheduler = make()
    add(scheduler, "a", range(12), salt="one")
    step(scheduler)
    add(scheduler, "b", range(12), salt="two")
    assert ("b", 0, 12, True) in step(scheduler)
    add(scheduler, "c", range(12), salt="one")
    assert ("c", 8, 4, True) in step(scheduler)


def test_many_that_come_at_once_compute_their_prefix_once() -> None:
    scheduler = make(budget=8)
    prefix = list(range(10, 22))
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        add(scheduler, name, [*prefix, last])
    add(scheduler, "other", range(50, 53))
    assert step(scheduler) == [("a", 0, 8, False)]
    assert step(scheduler) == [("a", 8, 5, True), ("other", 0, 3, True)]
    assert step(scheduler) == [
        ("a", 13, 1, True),
        ("other", 3, 1, True),
        ("b", 12, 1, True),
        ("c", 12, 1, True),
    ]


def test_a_small_part_is_rather_computed_twice_than_waited_for() -> None:
    scheduler = make()
    add(scheduler, "a", [*range(4), *range(10, 23)])
    add(scheduler, "b", [*range(4), *range(30, 43)])  # 4 of 17 tokens are shared
    assert step(scheduler) == [("a", 0, 17, True), ("b", 0, 17, True)]
    add(scheduler, "c", [*range(50, 54), *range(10, 22)])
    add(scheduler, "d", [*range(50, 54), *range(30, 42)])  # 4 of 16
    rows = step(scheduler)
    assert [row[0] for row in rows] == ["a", "b", "c"]


def test_nobody_waits_for_a_prefix_that_is_given_up() -> None:
    scheduler = make(budget=8)
    a = add(scheduler, "a", range(16))
    add(scheduler, "b", range(16))
    assert step(scheduler) == [("a", 0, 8, False)]
    scheduler.finish(a)
    assert step(scheduler) == [("b", 8, 8, True)]


def test_blocks_may_be_shared_once_the_tokens_of_their_step_were_taken() -> None:
    scheduler = make()
    add(scheduler, "a", range(12))
    first = launch(scheduler)
    add(scheduler, "b", range(12))
    second = launch(scheduler)
    assert rows_of(second) == [("a", 12, 1, True)]  # b waits: a's blocks are on their way
    take(scheduler, first)
    third = launch(scheduler)
    assert rows_of(third) == [("a", 13, 1, True), ("b", 8, 4, True)]


def test_nothing_of_a_failed_step_is_shared() -> None:
    scheduler = make(budget=8)
    a = add(scheduler, "a", range(16))
    take(scheduler, launch(scheduler))
    failing = launch(scheduler)
    assert rows_of(failing) == [("a", 8, 8, True)]
    scheduler.finish(a)  # as the engine ends the requests of a step that failed
    add(scheduler, "b", range(16))
    assert step(scheduler) == [("b", 8, 8, True)]


def test_a_row_that_went_wrong_takes_all_that_it_read_out_of_the_cache() -> None:
    scheduler = make()
    a = add(scheduler, "a", range(12))
    step(scheduler)
    scheduler.finish(a)
    b = add(scheduler, "b", range(12))
    plan = launch(scheduler)
    assert rows_of(plan) == [("b", 8, 4, True)]
    take(scheduler, plan, token=None)
    scheduler.finish(b)
    add(scheduler, "c", range(12))
    assert step(scheduler) == [("c", 0, 12, True)]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make(num_blocks=6)
    a = add(scheduler, "a", range(8))
    b = add(scheduler, "b", range(20, 28))
    assert step(scheduler) == [("a", 0, 8, True), ("b", 0, 8, True)]
    assert step(scheduler) == [("a", 8, 1, True)]
    assert b.num_preemptions == 1
    scheduler.finish(a)
    assert step(scheduler) == [("b", 8, 1, True)]
    assert b.num_cached_tokens == 0
    assert (scheduler.sharing.num_queries, scheduler.sharing.num_hits) == (16, 0)


def test_blocks_of_a_step_that_is_read_after_a_preemption_are_not_shared() -> None:
    scheduler = make(num_blocks=6)
    add(scheduler, "a", range(8))
    b = add(scheduler, "b", range(20, 28))
    first = launch(scheduler)
    second = launch(scheduler)  # a grows, b is out: whatever was b's may be a's now
    assert [r.request_id for r in second.preempted] == ["b"]
    take(scheduler, first)
    assert scheduler.blocks.find_prefix(b.block_keys(2, 4)).num_blocks == 0


def test_whose_prompt_is_to_have_logprobs_computes_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make()
    add(scheduler, "a", range(12))
    step(scheduler)
    monkeypatch.setattr(Request, "skips_prefix_cache", property(lambda self: True))
    add(scheduler, "b", range(12))
    assert ("b", 0, 12, True) in step(scheduler)


def test_a_request_that_could_not_be_admitted_without_its_prefix_is() -> None:
    scheduler = make(num_blocks=6)
    add(scheduler, "a", range(12), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", [*range(12), 1, 2, 3], 1)  # 4 blocks, 3 of them a's, who still holds them
    assert step(scheduler) == [("b", 12, 3, True)]


def test_a_request_that_is_preempted_and_then_spoiled_leaves_nothing_to_find() -> None:
    """Its blocks are in nobody's table by then, and known from a step before."""
    blocks = BlockManager(21, 4, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(1, 8, policy="priority"), blocks)

    def add(name: str, prompt: range, priority: int) -> Request:
        params = SamplingParams(max_tokens=2)
        request = Request(name, prompt, params, max_model_len=100, priority=priority)
        scheduler.add(request)
        return request

    def launch() -> StepPlan:
        plan = scheduler.schedule()
        scheduler.begin(plan)
        return plan

    spoiled = add("a", range(16), 0)
    scheduler.update(launch(), [])
    second = launch()  # the rest of its prompt, whose token is spoiled
    assert blocks.find_prefix(spoiled.block_keys(4, 4)).tables == ((1, 2),)
    add("b", range(50, 58), -5)
    third = launch()
    assert third.preempted == (spoiled,)
    scheduler.update(second, [None])
    scheduler.finish(spoiled)
    blocks.check()
    assert blocks.find_prefix(spoiled.block_keys(4, 4)).num_blocks == 0
    scheduler.update(third, [7])
    assert scheduler.sharing.find(add("c", range(16), 0)).num_blocks == 0
    blocks.check()
