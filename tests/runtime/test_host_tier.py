"""What is saved when blocks are evicted, and when it comes back: literal slots and plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.host_tier import HostTier, Load, Save
from octavo.runtime.prefix_cache import root_key
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan

KEYS = [b"a", b"b", b"c", b"d"]


def saved(tier: HostTier, *keys: bytes) -> None:
    """Have a step of its own save these, from blocks 1, 2 and so on."""
    tier.begin_plan()
    for block_id, key in enumerate(keys, 1):
        tier.save(key, block_id)
    saves = list(tier.drafted)
    tier.launched([])
    tier.commit(saves)
    tier.check()


def test_a_slot_is_found_once_its_step_has_succeeded() -> None:
    tier = HostTier(2, 1)
    tier.save(b"a", 7)
    assert tier.drafted == [Save(7, 0, b"a")]
    saves = list(tier.drafted)
    tier.launched([])
    assert (tier.find(b"a"), tier.drafted, tier.num_used_slots) == (None, [], 1)
    tier.commit(saves)
    tier.commit(saves)  # an interrupted update is done again
    assert (tier.find(b"a"), tier.find(b"b"), tier.num_saved) == (0, None, 1)
    tier.check()


@pytest.mark.parametrize("is_launched", [True, False])
def test_nothing_of_a_failed_step_is_found(is_launched: bool) -> None:
    tier = HostTier(1, 1)
    tier.save(b"a", 7)
    saves = list(tier.drafted)
    if is_launched:
        tier.launched([])
        tier.abandon(saves)
    else:
        tier.begin_plan()
    tier.save(b"b", 8)
    assert tier.drafted == [Save(8, 0, b"b")]
    tier.commit(saves)  # too late: the slot is another's
    assert (tier.find(b"a"), tier.find(b"b")) == (None, None)
    tier.check()


def test_what_is_there_is_not_saved_again_and_the_least_recently_used_goes() -> None:
    tier = HostTier(3, 1)
    saved(tier, b"a", b"b", b"c")
    tier.save(b"a", 9)
    assert not tier.drafted
    saved(tier, b"d")
    assert [tier.find(key) for key in KEYS] == [0, None, 2, 1]


def test_a_slot_keeps_what_a_step_is_yet_to_load() -> None:
    tier = HostTier(2, 1)
    saved(tier, b"a", b"b")
    tier.hold("r", [b"a", b"b"])
    tier.place("r", [5, 6])
    tier.save(b"c", 5)  # whose place the load takes: no slot may be written before that
    assert (tier.drafted, tier.due("r")) == ([], [Load(0, 5), Load(1, 6)])
    tier.forget([b"b"])
    tier.check()
    tier.save(b"c", 5)
    assert tier.drafted == []
    tier.launched(["r"])
    assert (tier.due("r"), tier.num_loaded) == ((), 2)
    # Of those that nobody reads any more, the forgotten one is free.
    saved(tier, b"c")
    assert [tier.find(key) for key in KEYS] == [0, None, 1, None]


def test_forgetting_reaches_what_is_being_saved() -> None:
    tier = HostTier(3, 1)
    saved(tier, b"a")
    tier.save(b"b", 4)
    saves = list(tier.drafted)
    tier.launched([])
    tier.clear()
    tier.commit(saves)
    assert (len(tier), tier.num_used_slots) == (0, 0)
    tier.check()


def test_no_slots_are_no_tier() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        HostTier(0, 1)


def make(num_blocks: int, *, num_slots: int = 20, min_load_tokens: int = 1) -> Scheduler:
    """A pool of ``num_blocks`` blocks of 4 tokens."""
    tier = HostTier(num_slots, min_load_tokens)
    blocks = BlockManager(num_blocks + 1, 4, enable_prefix_caching=True, host_tier=tier)
    return Scheduler(SchedulerConfig(8, 64, watermark=0.0), blocks)


def add(scheduler: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(name, prompt, params, max_model_len=1000, root_key=root_key("model"))
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.update(plan, [7] * sum(s.is_sampled for s in plan.sequences))
    for sequence in plan.sequences:
        if sequence.request.is_at_limit:
            scheduler.finish(sequence.request)
    scheduler.blocks.check()
    return plan


def copies(plan: StepPlan) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [(save.block_id, save.slot) for save in plan.saves], [*map(tuple, plan.loads)]


def rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(s.request.request_id, s.start, s.num_tokens) for s in plan.sequences]


def test_what_was_evicted_is_loaded_and_not_computed() -> None:
    scheduler = make(4)
    add(scheduler, "a", range(16))
    assert copies(step(scheduler)) == ([], [])
    add(scheduler, "b", range(100, 116))
    # Tails are evicted before heads, but for blocks that go on where the last one ended.
    plan = step(scheduler)
    assert sorted(save.block_id for save in plan.saves) == [1, 2, 3, 4]
    slot_of = {save.block_id: save.slot for save in plan.saves}
    again = add(scheduler, "c", range(16))
    plan = step(scheduler)
    assert rows(plan) == [("c", 12, 4)]
    table = plan.sequences[0].tables[0]
    assert [*map(tuple, plan.loads)] == [(slot_of[n], table[n - 1]) for n in (1, 2, 3)]
    assert len(plan.saves) == 4
    assert again.num_cached_tokens == 12
    sharing = scheduler.sharing
    assert (sharing.num_queries, sharing.num_hits, sharing.num_host_hits) == (48, 12, 12)


def test_matching_goes_on_where_the_device_ends() -> None:
    scheduler = make(6)
    add(scheduler, "a", range(17))
    step(scheduler)
    add(scheduler, "b", range(100, 112))  # evicts the tail of what is cached
    step(scheduler)
    add(scheduler, "c", range(17))
    found = scheduler.sharing.find(scheduler.waiting.peek()).num_blocks
    assert 0 < found < 4
    plan = step(scheduler)
    assert rows(plan) == [("c", 16, 1)]
    assert len(plan.loads) == 4 - found


@pytest.mark.parametrize(("min_load_tokens", "start"), [(12, 12), (13, 0)])
def test_a_short_run_is_computed(min_load_tokens: int, start: int) -> None:
    scheduler = make(4, min_load_tokens=min_load_tokens)
    for name, first in (("a", 0), ("b", 100), ("c", 0)):
        add(scheduler, name, range(first, first + 16))
        plan = step(scheduler)
    assert rows(plan) == [("c", start, 16 - start)]
    assert len(plan.loads) == start // 4


def test_a_preempted_request_is_swapped_out_and_in() -> None:
    scheduler = make(6)
    add(scheduler, "a", range(8), max_tokens=12)
    late = add(scheduler, "b", range(100, 112), max_tokens=4)
    plans = [step(scheduler)]
    while not late.num_preemptions:
        plans.append(step(scheduler))
    while late.status.value != "running":
        plans.append(step(scheduler))
    # Of its full blocks "a" has taken one or more; those have come back.
    assert rows(plans[-1])[-1][:2] == ("b", 12)
    num_saves = sum(len(plan.saves) for plan in plans[:-1])
    assert [len(plan.loads) for plan in plans if plan.loads] == [num_saves]


def test_the_loads_of_a_plan_that_was_not_launched_are_in_the_next() -> None:
    scheduler = make(4)
    for name, first in (("a", 0), ("b", 100)):
        add(scheduler, name, range(first, first + 16))
        step(scheduler)
    add(scheduler, "c", range(16))
    lost = scheduler.schedule()
    plan = scheduler.schedule()
    assert (plan.loads, len(lost.loads)) == (lost.loads, 3)
    assert (len(lost.saves), plan.saves) == (4, ())  # it may have run: who knows what is there now
    scheduler.begin(plan)
    assert scheduler.blocks.host_tier is not None
    assert not scheduler.blocks.host_tier.loading


def test_many_that_need_the_same_load_it_once() -> None:
    scheduler = make(10)
    for name, first in (("a", 0), ("b", 100)):
        add(scheduler, name, range(first, first + 40))
        step(scheduler)
    for name in ("c", "d", "e"):
        add(scheduler, name, range(16))
    plans = [step(scheduler), step(scheduler)]
    assert [rows(plan) for plan in plans] == [[("c", 12, 4)], [("d", 12, 4), ("e", 12, 4)]]
    assert [len(plan.loads) for plan in plans] == [3, 0]


def test_a_spoiled_request_takes_what_it_read_out_of_the_host_too() -> None:
    scheduler = make(4)
    for name, first in (("a", 0), ("b", 100)):
        add(scheduler, name, range(first, first + 16))
        step(scheduler)
    tier = scheduler.blocks.host_tier
    assert tier is not None
    assert len(tier) == 4
    spoiled = add(scheduler, "c", range(16))
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.update(plan, [None])
    scheduler.finish(spoiled)
    scheduler.blocks.check()
    assert len(tier) == 4  # those of "b", saved by that step
    assert tier.find(*spoiled.block_keys(1, 4)) is None
