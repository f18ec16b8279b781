"""Who goes first, who gives way, who is too late: literal orders."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.invariants import check_invariants
from octavo.runtime.policies import POLICIES, Urgency, estimated_steps
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan

AGEING = 60.0


class Bench:
    """A scheduler with a clock of its own, and steps of one second."""

    def __init__(
        self,
        policy: str,
        *,
        max_num_seqs: int = 2,
        num_blocks: int = 101,
        budget: int = 64,
        ageing: float = AGEING,
    ) -> None:
        self.now = 1000.0
        config = SchedulerConfig(
            max_num_seqs, budget, watermark=0.0, policy=policy, ageing_seconds=ageing
        )
        blocks = BlockManager(num_blocks, 4, enable_prefix_caching=True)
        self.scheduler = Scheduler(config, blocks, clock=lambda: self.now)
        self.finished: list[str] = []

    def add(
        self,
        name: str,
        prompt_len: int = 4,
        max_tokens: int = 4,
        *,
        deadline: float = math.inf,
        queue_deadline: float = math.inf,
        priority: int = 0,
        ignore_eos: bool = False,
    ) -> Request:
        """``deadline`` and ``queue_deadline`` are seconds from now."""
        request = Request(
            name,
            [len(name), *map(ord, name), *range(prompt_len)][:prompt_len],
            SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
            max_model_len=1000,
            arrival_time=self.now,
            priority=priority,
            deadline=self.now + deadline,
            queue_deadline=self.now + queue_deadline,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.begin(plan)
        self.scheduler.update(plan, [7 for s in plan.sequences if s.is_sampled])
        self.scheduler.deadlines.observe_step(1.0)
        self.now += 1.0
        for sequence in plan.sequences:
            if sequence.request.is_at_limit:
                self.finished.append(sequence.request.request_id)
                self.scheduler.finish(sequence.request)
        check_invariants(self.scheduler)
        return plan

    def names(self) -> list[str]:
        return [s.request.request_id for s in self.step().sequences]

    def run(self) -> list[str]:
        """The names in the order in which they end."""
        for _ in range(5000):
            if not (self.scheduler.running or self.scheduler.waiting):
                return self.finished
            self.step()
        raise AssertionError("somebody starves")

    def expired(self) -> list[tuple[str, str]]:
        return [(e.request.request_id, e.reason) for e in self.scheduler.expired]


def one_by_one(policy: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """In which order requests that wait at the same time are run, one at a time."""
    bench = Bench(policy, max_num_seqs=1)
    for name, options in requests:
        bench.add(name, **options)
        bench.now += 0.001
    return bench.run()


REQUESTS = [
    ("a", {"priority": 1, "max_tokens": 3}),
    ("b", {"priority": 0, "deadline": 50.0, "max_tokens": 8}),
    ("c", {"priority": 1, "deadline": 40.0, "max_tokens": 2}),
    ("d", {"priority": 0, "deadline": 45.0, "max_tokens": 5}),
    ("e", {"priority": 0, "max_tokens": 4}),
]


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", "dbeca"), ("edf", "cdbea"), ("fcfs", "abcde")]
)
def test_the_order_of_a_policy(policy: str, order: str) -> None:
    """By hand: edf has c due at 40, d at 45, b at 50, e and a at the ageing time, of which e is
    more urgent; priority takes d, b and e of 0, by deadline, then c and a of 1."""
    requests = [
        (name, {k: v for k, v in options.items() if policy != "fcfs" or k != "priority"})
        for name, options in REQUESTS
    ]
    bench = Bench(policy, max_num_seqs=1)
    for name, options in requests:
        bench.add(name, **options)
    assert "".join(bench.run()) == order


def test_shortest_counts_what_may_be_written_and_the_prompt() -> None:
    order = one_by_one(
        "shortest",
        [
            ("long", {"max_tokens": 30}),
            ("short", {"max_tokens": 3}),
            ("reads", {"prompt_len": 300, "max_tokens": 3}),
        ],
    )
    assert order == ["short", "reads", "long"]
    bench = Bench("shortest")
    assert estimated_steps(bench.add("x", prompt_len=300, max_tokens=3)) == 6


def test_equal_requests_come_in_the_order_of_arrival_under_every_policy() -> None:
    for policy in POLICIES:
        assert one_by_one(policy, [(name, {}) for name in "fedcba"]) == list("fedcba")


# Displacement.


def test_the_more_urgent_takes_the_seat_of_the_least_urgent() -> None:
    bench = Bench("priority")
    bench.add("low", priority=2, max_tokens=20)
    bench.add("mid", priority=1, max_tokens=20)
    assert bench.names() == ["mid", "low"]
    bench.add("high", priority=0, max_tokens=3)
    plan = bench.step()
    assert [r.request_id for r in plan.preempted] == ["low"]
    assert [s.request.request_id for s in plan.sequences] == ["mid", "high"]
    assert [r.request_id for r in bench.scheduler.waiting] == ["low"]
    bench.run()
    assert bench.finished == ["high", "mid", "low"]
    assert bench.scheduler.num_preemptions == 1


def test_the_more_urgent_takes_the_blocks_of_the_least_urgent() -> None:
    bench = Bench("priority", max_num_seqs=8, num_blocks=11)
    bench.add("a", 16, priority=1)
    bench.add("b", 16, priority=2)
    assert bench.names() == ["a", "b"]
    bench.add("high", 16, priority=0)
    plan = bench.step()
    assert [r.request_id for r in plan.preempted] == ["b"]
    assert [s.request.request_id for s in plan.sequences] == ["a", "high"]


def test_nobody_gives_way_in_vain() -> None:
    bench = Bench("priority", max_num_seqs=8, num_blocks=11)
    bench.add("mine", 20, priority=0, max_tokens=20)
    bench.add("low", 4, priority=2, max_tokens=20)
    assert bench.names() == ["mine", "low"]
    bench.add("high", 24, priority=0)  # 6 blocks, low has but 1 and 4 are free
    assert bench.names() == ["mine", "low"]
    assert bench.scheduler.num_preemptions == 0


def test_blocks_that_only_those_who_give_way_share_count_as_won() -> None:
    """Of 10 usable blocks two requests have 7, of which they share 5."""
    bench = Bench("priority", max_num_seqs=8, num_blocks=11)
    first = bench.add("first", 21, priority=5, max_tokens=3)
    bench.step()
    second = bench.add("second", 21, priority=5, max_tokens=3)
    second.token_ids[:20] = first.token_ids[:20]
    bench.step()
    assert bench.scheduler.blocks.num_free_blocks == 3
    bench.add("high", 34, priority=0, max_tokens=2)
    assert bench.names() == ["high"]
    assert bench.scheduler.num_preemptions == 2


@pytest.mark.parametrize(("num_blocks", "is_displaced"), [(11, True), (10, False)])
def test_blocks_that_the_newcomer_shares_do_not_count_as_won(
    num_blocks: int, is_displaced: bool
) -> None:
    """Of 10 usable blocks mine has 2, low 5, and 3 are free. Of the 8 that high needs 4 are low's
    already, so that low has but one to give."""
    bench = Bench("priority", max_num_seqs=8, num_blocks=num_blocks)
    bench.add("mine", 5, priority=0, max_tokens=4)
    low = bench.add("low", 17, priority=1, max_tokens=4)
    bench.step()
    prompt_of_low = low.token_ids[:16]
    high = bench.add("high", 30, priority=0, max_tokens=2)
    high.token_ids[:16] = prompt_of_low
    plan = bench.step()
    starts = {s.request.request_id: s.start for s in plan.sequences}
    assert starts == ({"mine": 5, "high": 16} if is_displaced else {"mine": 5, "low": 17})


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_do_not_displace_each_other(policy: str) -> None:
    bench = Bench(policy)
    for name in "abcdef":
        bench.add(name, max_tokens=6)
        bench.step()
    bench.run()
    assert bench.finished == list("abcdef")
    assert bench.scheduler.num_preemptions == 0


def test_an_earlier_deadline_does_not_displace_its_equal_in_priority() -> None:
    bench = Bench("priority", max_num_seqs=1)
    bench.add("first", max_tokens=5)
    bench.step()
    bench.add("due", max_tokens=2, deadline=20.0)
    bench.run()
    assert bench.finished == ["first", "due"]
    assert bench.scheduler.num_preemptions == 0


def test_a_displaced_request_does_not_displace_in_turn() -> None:
    bench = Bench("priority", max_num_seqs=1)
    bench.add("low", priority=5, max_tokens=10)
    bench.step()
    bench.now += 10 * AGEING  # low has aged far beyond those that come now
    bench.add("high", priority=0, max_tokens=10)
    assert bench.names() == ["low"]  # and gives way no more
    young = Bench("priority", max_num_seqs=1)
    young.add("low", priority=1, max_tokens=10)
    young.step()
    young.add("high", priority=0, max_tokens=100)
    assert [young.names() for _ in range(100)] == [["high"]] * 100
    assert young.scheduler.num_preemptions == 1


def test_an_earlier_deadline_displaces_and_the_lack_of_one_does_not() -> None:
    bench = Bench("edf", max_num_seqs=1)
    bench.add("late", deadline=50.0, max_tokens=20)
    assert bench.names() == ["late"]
    bench.add("none", max_tokens=3)
    assert bench.names() == ["late"]
    bench.add("soon", deadline=20.0, max_tokens=3)
    assert bench.names() == ["soon"]
    assert bench.run() == ["soon", "late", "none"]


def test_a_long_prompt_does_not_hold_up_the_more_urgent() -> None:
    bench = Bench("priority", budget=8)
    bench.add("long", 100, priority=1)
    assert bench.names() == ["long"]
    bench.add("high", 20, priority=0)
    plans = [bench.step() for _ in range(3)]
    shares = [[(s.request.request_id, s.num_tokens) for s in plan.sequences] for plan in plans]
    assert shares == [[("high", 8)], [("high", 8)], [("high", 4), ("long", 4)]]
    assert bench.scheduler.num_preemptions == 0


def test_when_blocks_run_out_the_least_urgent_yields() -> None:
    bench = Bench("priority", num_blocks=5, max_num_seqs=3)
    bench.add("low", 4, priority=1, max_tokens=8)
    bench.add("high", 4, priority=0, max_tokens=8)
    bench.add("mid", 4, priority=0, max_tokens=8)
    assert bench.names() == ["high", "mid", "low"]
    plan = bench.step()  # all three need a second block, one is free
    assert [r.request_id for r in plan.preempted] == ["low"]


# Ageing.


@pytest.mark.parametrize(("deadline", "num_ages"), [(math.inf, 2), (1e4, 2), (500.0, 2), (1.0, 3)])
def test_a_priority_is_overtaken_only_within_the_stated_bound(
    deadline: float, num_ages: int
) -> None:
    """Priority 2 waits for a stream of priority 0."""
    bench = Bench("priority", max_num_seqs=1)
    bench.add("running", max_tokens=2)
    low = bench.add("low", priority=2, max_tokens=1)
    start = bench.now
    count = 0
    for _ in range(1000):
        if low.first_scheduled_time is not None:
            break
        bench.add(f"high{count}", priority=0, max_tokens=1, deadline=deadline)  # one a step
        count += 1
        bench.step()
    served = [name for name in bench.finished if name.startswith("high")]
    assert low.first_scheduled_time is not None, "it starves"
    # high<i> arrived i seconds after low: the last one served before it within the bound.
    last = max(int(name[4:]) for name in served)
    assert num_ages * AGEING - 2 <= last <= num_ages * AGEING
    assert low.first_scheduled_time - start <= num_ages * AGEING + 4


@pytest.mark.parametrize("policy", ["priority", "edf", "shortest"])
def test_nobody_is_overtaken_beyond_the_bound(policy: str) -> None:
    """Random traffic of 1.2 times what can be served, against the bounds in the docstrings."""
    rng = random.Random(1)
    ageing = 50 * AGEING if policy == "shortest" else AGEING
    bench = Bench(policy, max_num_seqs=1, ageing=ageing)
    requests = []
    for i in range(150):
        requests.append(
            bench.add(
                str(i),
                max_tokens=rng.randint(1, 40),
                priority=rng.randint(0, 2) if policy != "shortest" else 0,
            )
        )
        for _ in range(rng.randint(5, 28)):
            bench.step()
    bench.run()
    num_overtakings = 0
    for one in requests:
        for other in requests:
            assert one.first_scheduled_time is not None
            assert other.first_scheduled_time is not None
            is_overtaken = other.first_scheduled_time < one.first_scheduled_time
            if other.arrival_time > one.arrival_time and is_overtaken:
                num_overtakings += 1
                assert other.arrival_time - one.arrival_time <= bound(policy, one, other, ageing)
    assert (num_overtakings > 20) == (policy != "edf")


def bound(policy: str, one: Request, other: Request, ageing: float) -> float:
    if policy == "priority":
        return (one.priority - other.priority) * ageing
    if policy == "shortest":
        return estimated_steps(one) * ageing / 1000
    return ageing


# Deadlines.


def test_who_is_past_the_deadline_ends_whether_it_waits_or_runs() -> None:
    bench = Bench("fcfs", max_num_seqs=1)
    bench.add("runs", max_tokens=50, deadline=3.0)
    bench.add("waits", max_tokens=50, deadline=2.5)
    bench.add("patient", max_tokens=2)
    assert [bench.names() for _ in range(4)] == [["runs"], ["runs"], ["runs"], ["patient"]]
    assert bench.expired() == [("waits", "deadline"), ("runs", "deadline")]


def test_a_queue_timeout_ends_who_was_not_started_and_nobody_else() -> None:
    bench = Bench("priority", max_num_seqs=1)
    bench.add("runs", max_tokens=50, queue_deadline=2.0, priority=1)
    bench.add("waits", queue_deadline=2.0, priority=2)
    bench.step()
    bench.add("high", priority=0, max_tokens=4)  # displaces runs, which was started in time
    for _ in range(3):
        assert bench.names() == ["high"]
    assert bench.expired() == [("waits", "queue_timeout")]
    bench.run()
    assert bench.finished == ["high", "runs"]


@pytest.mark.parametrize("policy", ["priority", "edf"])
def test_who_cannot_make_it_any_more_is_not_started(policy: str) -> None:
    """Steps take a second: 10 tokens that are sure to come cannot be there in 5."""
    bench = Bench(policy, max_num_seqs=1)
    bench.add("first", max_tokens=3)
    bench.step()
    bench.add("hopeless", max_tokens=10, ignore_eos=True, deadline=5.0)
    bench.add("may stop early", max_tokens=10, deadline=9.0)
    assert bench.names() == (["may stop early"] if policy == "edf" else ["first"])
    bench.run()
    assert bench.expired()[0] == ("hopeless", "deadline")
    assert "hopeless" not in bench.finished


def test_before_any_step_was_seen_nobody_is_given_up() -> None:
    bench = Bench("fcfs")
    bench.add("quick", max_tokens=10, ignore_eos=True, deadline=0.5)
    assert bench.names() == ["quick"]


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    bench = Bench("fcfs")
    for i in range(1000):
        request = bench.add(str(i), deadline=1e6, queue_deadline=1e6)
        bench.scheduler.finish(request)
    assert len(bench.scheduler.deadlines._heap) <= 260


# What is refused.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": True}, "priority must be an integer"),
        ({"priority": 2**31}, "priority must be at most"),
        ({"deadline_ms": 0}, "deadline_ms must be above 0"),
        ({"deadline_ms": math.inf}, "deadline_ms must be finite"),
        ({"queue_timeout_ms": -1.0}, "queue_timeout_ms must be above 0"),
        ({"queue_timeout_ms": "soon"}, "queue_timeout_ms must be a number"),
    ],
)
def test_an_impossible_urgency(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Urgency(**fields)


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_a_priority_that_would_mean_nothing_is_refused(policy: str) -> None:
    bench = Bench(policy)
    with pytest.raises(InvalidRequest, match="priority=1 means nothing under"):
        bench.add("a", priority=1)
    assert not bench.scheduler.has_unfinished
