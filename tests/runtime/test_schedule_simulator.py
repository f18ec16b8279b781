"""The simulator against times worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.policies import Urgency
from octavo.runtime.schedule_simulator import CostModel, Simulator, TraceRequest
from octavo.runtime.scheduler import SchedulerConfig

# A step is one second, a prompt token a tenth: the rest is free.
COST = CostModel(
    step_ms=1000.0, prefill_token_us=100_000.0, decode_token_us=0.0, context_token_us=0.0
)


def simulator(policy: str = "fcfs", max_num_seqs: int = 1, **cost: float) -> Simulator:
    config = SchedulerConfig(max_num_seqs, 100, policy=policy)
    return Simulator(config, num_blocks=50, block_size=4, cost=CostModel(**cost) if cost else COST)


def test_times_of_two_requests_one_after_the_other() -> None:
    trace = [TraceRequest(0.5, 10, 3, 3), TraceRequest(0.5, 20, 2, 8)]
    result = simulator().run(trace)
    first, second = result.outcomes
    # Arrival 0.5, prefill of 10 takes 1 + 1 s, two decodes 1 s each.
    assert first.first_token_seconds == pytest.approx(2.5)
    assert first.end_seconds == pytest.approx(4.5)
    assert (second.ttft_seconds, second.latency_seconds) == pytest.approx((7.0, 8.0))
    assert (result.seconds, result.num_steps) == (pytest.approx(8.5), 5)
    assert result.num_computed_tokens == 10 + 2 + 20 + 1


def test_every_kind_of_token_has_its_cost() -> None:
    result = simulator(
        max_num_seqs=2,
        step_ms=1.0,
        prefill_token_us=10.0,
        decode_token_us=100.0,
        context_token_us=1.0,
    ).run([TraceRequest(0.0, 8, 2, 2), TraceRequest(0.0, 5, 2, 2)])
    prefill = 1000 + 13 * 10 + 13
    decode = 1000 + 2 * 100 + 15
    assert result.seconds == pytest.approx((prefill + decode) / 1e6)


def test_idle_time_is_jumped_over() -> None:
    result = simulator().run([TraceRequest(100.0, 10, 1, 1), TraceRequest(0.0, 10, 1, 1)])
    assert [o.end_seconds for o in result.outcomes] == pytest.approx([102.0, 2.0])
    assert result.num_steps == 2


def test_what_windows_leave_free_is_there_for_others() -> None:
    """Two contexts of 199 tokens, of which either fills a pool of 50 blocks that keeps it all."""
    trace = [TraceRequest(0.0, 100, 100, 100), TraceRequest(0.0, 100, 100, 100)]
    config = SchedulerConfig(2, 100)
    # One after the other; or both at once, the second's prompt in two steps of 99 tokens and one.
    for group, num_steps in ((FULL, 100 + 100), (BlockGroup(window=8), 2 + 100)):
        result = Simulator(config, num_blocks=50, block_size=4, groups=(group,)).run(trace)
        assert result.num_steps == num_steps
        assert all(outcome.is_done for outcome in result.outcomes)


def test_the_policy_decides() -> None:
    trace = [
        TraceRequest(0.0, 10, 6, 6, Urgency(priority=1)),
        TraceRequest(2.5, 10, 1, 1, Urgency(priority=0)),
    ]
    fcfs, by_priority = (simulator(name).run(trace) for name in ("fcfs", "priority"))
    assert fcfs.outcomes[1].latency_seconds == pytest.approx(6.5)
    # It waits for the step that runs from 2 to 3 and displaces the other, which then computes
    # the 12 tokens that it has again but for those of its two full blocks: 8 of 12.
    assert by_priority.outcomes[1].latency_seconds == pytest.approx(2.5)
    assert by_priority.outcomes[0].num_preemptions == by_priority.num_preemptions == 1
    assert by_priority.num_computed_tokens == 10 + 1 + 10 + 4 + 3


def test_who_runs_out_of_time_says_so() -> None:
    trace = [
        TraceRequest(0.0, 10, 9, 9, Urgency(deadline_ms=3500)),
        TraceRequest(0.0, 10, 1, 1, Urgency(queue_timeout_ms=1000)),
    ]
    late, timed_out = simulator().run(trace).outcomes
    assert (late.reason, late.first_token_seconds, late.is_done) == ("deadline", 2.0, False)
    assert late.end_seconds == pytest.approx(4.0)  # the step that ran when its time was over
    assert (timed_out.reason, timed_out.ttft_seconds) == ("queue_timeout", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.0, 0, 1, 1), "prompt_tokens must be at least 1"),
        ((0.0, 1, 0, 1), "output_tokens must be at least 1"),
        ((0.0, 1, 5, 4), "max_tokens must be at least 5"),
        ((-1.0, 1, 1, 1), "arrival must be at least 0"),
    ],
)
def test_impossible_requests(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TraceRequest(*fields)


def test_it_needs_no_pytorch() -> None:
    code = "import sys, octavo.runtime.schedule_simulator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
