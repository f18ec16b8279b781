"""Policies and deadlines through LLM: what a user gives, and what comes back."""

from __future__ import annotations

import random
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.deadlines import Deadlines
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.policies import POLICIES
from octavo.runtime.sampling_params import SamplingParams

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@OVERLAP
@pytest.mark.parametrize("policy", POLICIES)
def test_no_order_changes_an_answer(shared_toy: Path, policy: str, overlap: bool) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 30), seed=i, ignore_eos=True) for i in range(16)
    ]
    urgency: dict[str, Any] = {"deadline_ms": [1e6 * rng.randint(1, 9) for _ in prompts]}
    if policy in ("priority", "edf"):
        urgency["priority"] = [rng.randint(-3, 3) for _ in prompts]
    if policy == "fair":
        urgency["client"] = [rng.choice("abc") for _ in prompts]
    alone = LLM(shared_toy, max_num_seqs=1)
    llm = LLM(
        shared_toy,
        scheduling_policy=policy,
        async_scheduling=overlap,
        max_num_seqs=3,
        block_size=8,
        num_gpu_blocks_override=16,
        max_model_len=120,
        check_invariants=True,
    )
    expected = [output.outputs[0].token_ids for output in alone.generate(prompts, params)]
    outputs = llm.generate(prompts, params, **urgency)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.stats().deadlines_met == 16
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_the_urgent_are_done_first(shared_toy: Path) -> None:
    llm = LLM(shared_toy, scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([[1], [2], [3]], GREEDY, priority=[3, 2, 1])
    done = [output.metrics.finished_time for output in outputs if output.metrics]
    assert done == sorted(done, reverse=True)
    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.first_scheduled_time is not None
        assert output.metrics.first_token_time is not None
        assert (
            output.metrics.arrival_time
            <= output.metrics.first_scheduled_time
            <= output.metrics.first_token_time
        )


@OVERLAP
def test_time_that_runs_out_has_a_finish_reason_of_its_own(shared_toy: Path, overlap: bool) -> None:
    llm = LLM(shared_toy, max_num_seqs=1, async_scheduling=overlap, check_invariants=True)
    prompts = [[1], [2], [3], [4]]
    outputs = llm.generate(
        prompts,
        GREEDY,
        deadline_ms=[1e6, 0.001, None, None],
        queue_timeout_ms=[None, None, 0.001, 1e6],
    )
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "deadline", "queue_timeout", "length"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 0, 0, 8]
    stats = llm.stats()
    assert (stats.deadlines_met, stats.deadlines_missed, stats.queue_timeouts) == (1, 1, 1)
    assert not llm.engine.has_unfinished_requests()


def test_a_deadline_ends_a_running_answer_with_what_there_is(shared_toy: Path) -> None:
    llm = LLM(shared_toy)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    expected = llm.generate([[1]], params)[0].outputs[0].token_ids
    llm.engine.scheduler.deadlines = Deadlines()  # it has seen no steps that say it is hopeless
    start, steps = time.monotonic(), count()
    llm.engine.scheduler._clock = lambda: start + 0.1 * next(steps)
    completion = llm.generate([[1]], params, deadline_ms=20_000)[0].outputs[0]
    assert completion.finish_reason == "deadline"
    assert 150 < len(completion.token_ids) < 210
    assert completion.token_ids == expected[: len(completion.token_ids)]


@pytest.mark.parametrize(
    ("urgency", "message"),
    [
        ({"priority": [1]}, "1 values of priority for 2 prompts"),
        ({"priority": 1}, "priority=1 means nothing under scheduling_policy='fcfs'"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"deadline_ms": [5, 0]}, "deadline_ms must be above 0"),
        ({"queue_timeout_ms": "5"}, "queue_timeout_ms must be a number"),
    ],
)
def test_what_makes_no_sense_is_refused(
    shared_toy: Path, urgency: dict[str, Any], message: str
) -> None:
    llm = LLM(shared_toy)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([[1], [2]], GREEDY, **urgency)
    assert not llm.engine.has_unfinished_requests()
