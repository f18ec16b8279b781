"""Clients share the engine by what was computed for them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvariantError
from octavo.runtime.fair_queue import FairQueue
from octavo.runtime.invariants import check_invariants
from octavo.runtime.policies import PROMPT_TOKENS_A_STEP, Urgency
from octavo.runtime.prefix_cache import root_key
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.schedule_simulator import CostModel, Simulator, TraceRequest
from octavo.runtime.scheduler import Scheduler, SchedulerConfig


class Bench:
    """A scheduler under "fair", one step at a time."""

    def __init__(self, max_num_seqs: int = 1, num_blocks: int = 200, budget: int = 64) -> None:
        blocks = BlockManager(num_blocks + 1, 4, enable_prefix_caching=True)
        config = SchedulerConfig(max_num_seqs, budget, watermark=0.0, policy="fair")
        self.scheduler = Scheduler(config, blocks)
        self.finished: list[str] = []
        self.served: Counter[str] = Counter()  # tokens of answers, by client
        self._num_added = 0

    def add(self, client: str, max_tokens: int = 4, prompt_len: int = 4) -> Request:
        name = f"{client}{self._num_added}"
        self._num_added += 1
        prompt = [self._num_added] * prompt_len
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, prompt, params, max_model_len=1000, client=client)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.begin(plan)
        sampled = [s.request for s in plan.sequences if s.is_sampled]
        self.scheduler.update(plan, [7] * len(sampled))
        for request in sampled:
            self.served[request.client] += 1
            if request.is_at_limit:
                self.scheduler.finish(request)
                self.finished.append(request.request_id)
        check_invariants(self.scheduler)

    def run(self) -> list[str]:
        while self.scheduler.has_unfinished:
            self.step()
        return self.finished


def test_a_client_that_asks_for_little_does_not_wait_for_one_that_asks_for_much() -> None:
    bench = Bench()
    for _ in range(4):
        bench.add("a")
    bench.step()
    bench.add("b")
    bench.add("b")
    # The first of "a" runs; then "b" catches up with it, and they take turns.
    assert bench.run() == ["a0", "b4", "a1", "b5", "a2", "a3"]


def test_long_answers_count_for_more_than_short_ones() -> None:
    bench = Bench()
    for client, max_tokens in (("a", 8), ("a", 8), ("b", 2), ("b", 2), ("b", 2), ("b", 2)):
        bench.add(client, max_tokens)
    assert bench.run() == ["a0", "b2", "b3", "b4", "b5", "a1"]


def test_a_pause_saves_up_nothing() -> None:
    bench = Bench()
    for _ in range(5):
        bench.add("a")
    for _ in range(8):
        bench.step()  # two of "a", alone
    for _ in range(5):
        bench.add("b")
    # "b" is owed none of what it did not ask for.
    assert bench.run() == ["a0", "a1", "a2", "b5", "a3", "b6", "a4", "b7", "b8", "b9"]


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_always_wait_are_served_alike(seed: int) -> None:
    """Within the bound of the paper: twice what a step's sequences may yet cost."""
    rng = random.Random(seed)
    bench = Bench(max_num_seqs=4)
    for _ in range(60):
        bench.add("a", rng.randint(1, 20))
        bench.add("b", rng.randint(1, 4), rng.randint(1, 30))
        bench.add("b", rng.randint(1, 4))
        bench.add("c", rng.randint(10, 20))
    bound = 2 * max(4 * 20, 30 / PROMPT_TOKENS_A_STEP)
    while {r.client for r in bench.scheduler.waiting} == {"a", "b", "c"}:
        bench.step()
        assert max(bench.served.values()) - min(bench.served.values()) <= bound
    assert sum(bench.served.values()) > 300


def test_what_is_put_off_costs_nothing_and_what_gives_way_what_was_done() -> None:
    queue = FairQueue(PROMPT_TOKENS_A_STEP)
    params = SamplingParams(max_tokens=50)

    def request(client: str, order: int) -> Request:
        made = Request(f"{client}{order}", [1] * 100, params, max_model_len=500, client=client)
        made.order, made.rank = order, (0.0, 0.0, order)
        return made

    first, other, second = request("a", 0), request("b", 1), request("a", 2)
    for each in (first, other, second):
        queue.push(each)
    assert queue.pop() is first
    assert queue.peek() is other  # a prompt of 100 tokens counts as one of an answer
    queue.push(first)  # it was put off
    assert queue.pop() is first
    first.status = RequestStatus.RUNNING
    first.token_ids += [7] * 10
    first.status = RequestStatus.PREEMPTED
    queue.push(first)
    assert [queue.pop() for _ in range(3)] == [other, first, second]
    assert len(queue) == 0
    other.token_ids += [7] * 30
    queue.ended(other)
    late = request("b", 3)
    third = request("a", 4)
    queue.push(third)
    queue.push(late)
    assert third in queue
    assert [*queue] == [late, third]
    assert queue.peek() is third  # 12 steps were done for "a" and 31 for "b"
    queue.remove(third)
    assert third not in queue
    assert queue.peek() is late


def test_who_waits_for_a_prefix_that_is_computed_stays_first() -> None:
    bench = Bench(max_num_seqs=2, budget=8)
    root = root_key("model")
    params = SamplingParams(max_tokens=2)
    requests = [
        Request(name, range(16), params, max_model_len=100, root_key=root, client=client)
        for name, client in (("x", "a"), ("y", "b"))
    ]
    for each in requests:
        bench.scheduler.add(each)
    bench.add("c", max_tokens=20)
    bench.run()
    assert requests[1].num_cached_tokens == 12
    assert bench.finished == ["x", "y", "c0"]


def test_a_flood_of_one_client_in_the_simulator() -> None:
    """A thousand requests at once, and one a second of another client."""
    flood = [TraceRequest(0.0, 50, 50, 64, Urgency(client="flood")) for _ in range(400)]
    light = [TraceRequest(1.0 + i, 50, 20, 32, Urgency(client="light")) for i in range(20)]
    worst = {}
    for policy in ("fcfs", "fair"):
        config = SchedulerConfig(16, 512, policy=policy)
        simulator = Simulator(config, num_blocks=2000, cost=CostModel())
        outcomes = simulator.run([*flood, *light]).outcomes
        assert all(outcome.is_done for outcome in outcomes)
        worst[policy] = max(outcome.ttft_seconds or 0.0 for outcome in outcomes[400:])
    assert worst["fair"] < 1.0 < 10.0 < worst["fcfs"]


def test_counts_of_clients_that_are_gone_are_forgotten() -> None:
    queue = FairQueue(PROMPT_TOKENS_A_STEP)
    params = SamplingParams(max_tokens=5)
    held = Request("held", [1], params, max_model_len=50, client="held")
    queue.push(held)
    assert queue.pop() is held
    for number in range(5000):
        name = f"client {number}"
        request = Request(name, [1] * 100, params, max_model_len=500, client=name)
        queue.push(request)
        assert queue.pop() is request
        request.token_ids += [7] * 5
        queue.ended(request)
    assert len(queue._served) <= 1001
    queue.ended(held)
    queue.push(held)  # the first since nobody had anything to do
    assert not queue._served


def test_a_request_that_is_lost_is_noticed() -> None:
    bench = Bench()
    bench.add("a", max_tokens=9)
    bench.step()
    queue = bench.scheduler.waiting
    assert isinstance(queue, FairQueue)
    queue._runs.clear()
    with pytest.raises(InvariantError, match="not those that run"):
        bench.step()
