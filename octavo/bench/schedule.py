"""Compares scheduling policies on a trace, and measures what planning a step costs."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.report import Grid
from octavo.ir.errors import OctavoError
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.policies import Urgency
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.schedule_simulator import CostModel, Simulation, Simulator, TraceRequest
from octavo.runtime.scheduler import Scheduler, SchedulerConfig

_LENGTHS = ("prompt_tokens", "output_tokens", "max_tokens")
_URGENCY = ("priority", "deadline_ms", "queue_timeout_ms", "client")
_EXPECTED = (
    "expected an object with arrival_ms, prompt_tokens and output_tokens, and perhaps max_tokens, "
    "priority, deadline_ms, queue_timeout_ms, client"
)


@dataclass(frozen=True)
class PolicyFigures:
    """What a policy made of a trace. Times in seconds; None where nobody was there to measure.

    ``urgent`` are the requests of the most urgent priority in the trace. A deadline is met when the
    whole answer was there in time. The worst client is the one that waits longest for a first token
    at the median.
    """

    policy: str
    num_done: int
    num_ended_early: int
    ttft_p50: float | None
    ttft_p99: float | None
    urgent_ttft_p99: float | None
    worst_client_ttft_p50: float | None
    latency_p50: float | None
    latency_p99: float | None
    deadlines_met: float | None
    num_preemptions: int
    num_computed_tokens: int
    seconds: float


@dataclass(frozen=True)
class Overhead:
    """What the scheduler's three calls for a step cost, in milliseconds."""

    policy: str
    num_running: int
    num_waiting: int
    num_steps: int
    median_ms: float
    p99_ms: float


def read_trace(path: Path) -> list[TraceRequest]:
    """A trace of JSON lines, a request each. Raises OctavoError, naming the line."""
    trace = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                trace.append(_traced(json.loads(line)))
            except (ValueError, InvalidRequest) as error:
                raise OctavoError(f"{path}, line {number}: {error}") from None
    if not trace:
        raise OctavoError(f"{path} holds no request; {_EXPECTED} on each line")
    return trace


def _traced(row: Any) -> TraceRequest:
    known = {"arrival_ms", *_LENGTHS, *_URGENCY}
    needed = {"arrival_ms", "prompt_tokens", "output_tokens"}
    if not isinstance(row, dict) or not needed <= row.keys() <= known:
        raise ValueError(_EXPECTED)
    arrival = row["arrival_ms"]
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)):
        raise ValueError(f"arrival_ms must be a number, got {arrival!r}")
    lengths = {name: row[name] for name in _LENGTHS if name in row}
    lengths.setdefault("max_tokens", lengths["output_tokens"])
    urgency = Urgency(**{name: row[name] for name in _URGENCY if name in row})
    return TraceRequest(arrival / 1e3, **lengths, urgency=urgency)


def make_trace(num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, ``rate`` a second, of three kinds: a third are chats that are wanted within
    15 s (priority 0), a third may take a minute (1), and the rest are long and may wait (2). Each
    kind is from a client of its own.

    Lengths are log-normal; users allow the next power of two of what they get.
    """
    rng = random.Random(seed)
    kinds = ((0, 150, 60, 15_000.0), (1, 400, 120, 60_000.0), (2, 800, 250, None))
    now, trace = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        priority, prompt, output, deadline_ms = rng.choice(kinds)
        output_tokens = _lognormal(rng, output)
        trace.append(
            TraceRequest(
                now,
                _lognormal(rng, prompt),
                output_tokens,
                1 << (output_tokens - 1).bit_length(),
                Urgency(priority, deadline_ms, client=f"client {priority}"),
            )
        )
    return trace


def _lognormal(rng: random.Random, median: int) -> int:
    """A length of 1 to 4096 tokens."""
    return max(1, min(4096, round(median * rng.lognormvariate(0.0, 0.8))))


def compare(
    trace: Sequence[TraceRequest],
    configs: Sequence[SchedulerConfig],
    *,
    num_blocks: int,
    block_size: int,
    cost: CostModel,
) -> list[PolicyFigures]:
    """Replay a trace under each configuration."""
    return [
        _figures(
            config.policy,
            Simulator(config, num_blocks=num_blocks, block_size=block_size, cost=cost).run(trace),
        )
        for config in configs
    ]


def _figures(policy: str, simulation: Simulation) -> PolicyFigures:
    outcomes = simulation.outcomes
    most_urgent = min(outcome.request.urgency.priority for outcome in outcomes)
    urgent = [o for o in outcomes if o.request.urgency.priority == most_urgent]
    ttfts = [o.ttft_seconds for o in outcomes if o.ttft_seconds is not None]
    urgent_ttfts = [o.ttft_seconds for o in urgent if o.ttft_seconds is not None]
    by_client: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.ttft_seconds is not None:
            by_client.setdefault(outcome.request.urgency.client, []).append(outcome.ttft_seconds)
    latencies = [o.latency_seconds for o in outcomes if o.is_done]
    due = [o.is_done for o in outcomes if o.request.urgency.deadline_ms is not None]
    return PolicyFigures(
        policy,
        num_done=len(latencies),
        num_ended_early=len(outcomes) - len(latencies),
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        urgent_ttft_p99=percentile(urgent_ttfts, 99),
        worst_client_ttft_p50=max(
            (p for each in by_client.values() if (p := percentile(each, 50)) is not None),
            default=None,
        ),
        latency_p50=percentile(latencies, 50),
        latency_p99=percentile(latencies, 99),
        deadlines_met=sum(due) / len(due) if due else None,
        num_preemptions=simulation.num_preemptions,
        num_computed_tokens=simulation.num_computed_tokens,
        seconds=simulation.seconds,
    )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The least of the values that so many percent do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


def measure_overhead(
    policy: str, *, num_running: int = 256, num_waiting: int = 1000, num_steps: int = 500
) -> Overhead:
    """Time the planning and the bookkeeping of decode steps, with nothing between them.

    Prompts have other lengths each, so that blocks fill in other steps, and those that wait have
    all kinds of urgency. The first steps, in which the running start, are not counted.
    """
    config = SchedulerConfig(num_running, 32 * num_running, policy=policy)
    rng = random.Random(0)
    num_warm = 50
    longest = 640 + num_warm + num_steps
    blocks = BlockManager(2 + num_running * longest // 16, 16, enable_prefix_caching=True)
    scheduler = Scheduler(config, blocks)
    params = SamplingParams(max_tokens=num_warm + num_steps + 1)
    arrival = time.monotonic()
    for number in range(num_running + num_waiting):
        is_running = number < num_running
        heeds = scheduler.policy.heeds_priority and not is_running
        scheduler.add(
            Request(
                str(number),
                [number] * rng.randint(1, 600),
                params,
                max_model_len=longest,
                arrival_time=arrival + number * 1e-6,
                priority=rng.randint(0, 2) if heeds else 0,
                deadline=arrival + rng.uniform(1e5, 2e5),
            )
        )
    seconds = []
    for _ in range(num_warm + num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.begin(plan)
        scheduler.update(plan, [0] * sum(s.is_sampled for s in plan.sequences))
        seconds.append(time.perf_counter() - start)
    counted = seconds[num_warm:]
    assert len(scheduler.running) == num_running, "somebody did not get to run"
    return Overhead(
        policy,
        num_running,
        len(scheduler.waiting),
        num_steps,
        statistics.median(counted) * 1e3,
        sorted(counted)[-(-99 * num_steps // 100) - 1] * 1e3,
    )


def policy_grid(figures: Sequence[PolicyFigures]) -> Grid:
    """A row for each policy."""
    columns = (
        "policy",
        "done",
        "ended early",
        "TTFT p50 s",
        "p99 s",
        "urgent p99 s",
        "worst client p50 s",
        "latency p50 s",
        "p99 s",
        "deadlines met",
        "preemptions",
        "tokens computed",
    )
    rows = [
        (
            f.policy,
            f"{f.num_done:,}",
            f"{f.num_ended_early:,}",
            *map(
                _seconds,
                (
                    f.ttft_p50,
                    f.ttft_p99,
                    f.urgent_ttft_p99,
                    f.worst_client_ttft_p50,
                    f.latency_p50,
                    f.latency_p99,
                ),
            ),
            "" if f.deadlines_met is None else f"{f.deadlines_met:.0%}",
            f"{f.num_preemptions:,}",
            f"{f.num_computed_tokens:,}",
        )
        for f in figures
    ]
    return Grid("Policies on the trace", columns, rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def overhead_grid(overheads: Sequence[Overhead]) -> Grid:
    """A row for each policy."""
    rows = [
        (
            o.policy,
            f"{o.num_running:,}",
            f"{o.num_waiting:,}",
            f"{o.median_ms:.3f}",
            f"{o.p99_ms:.3f}",
        )
        for o in overheads
    ]
    return Grid("Scheduler", ("policy", "running", "waiting", "median ms a step", "p99 ms"), rows)


def to_json(policies: Sequence[PolicyFigures], overheads: Sequence[Overhead]) -> str:
    """Both kinds of figures as JSON."""
    body = {
        "policies": [dataclasses.asdict(figures) for figures in policies],
        "overhead": [dataclasses.asdict(overhead) for overhead in overheads],
    }
    return json.dumps(body, indent=2) + "\n"
