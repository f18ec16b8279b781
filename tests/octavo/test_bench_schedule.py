"""``octavo bench schedule``: traces, figures, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_refused

from octavo.bench.schedule import make_trace, measure_overhead, percentile, read_trace
from octavo.runtime.policies import POLICIES


@pytest.fixture
def octavo_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capfd, monkeypatch)


def write_trace(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_figures_of_a_trace_worked_out_by_hand(octavo_here: Command, tmp_path: Path) -> None:
    """One sequence at a time, a step a second, all else free."""
    trace = write_trace(
        tmp_path / "trace.jsonl",
        {"arrival_ms": 0, "prompt_tokens": 9, "output_tokens": 6, "priority": 1},
        {"arrival_ms": 500, "prompt_tokens": 9, "output_tokens": 2, "deadline_ms": 4000},
    )
    costs = ("--step-ms", "1000", "--prefill-token-us", "0", "--decode-token-us", "0")
    costs += ("--context-token-us", "0", "--max-num-seqs", "1")
    output = tmp_path / "out.json"
    policies = ("--policies", "fcfs,priority")
    done = octavo_here("bench", "schedule", trace, *policies, *costs, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "Policies on the trace" in done.stdout
    fcfs, priority = json.loads(output.read_text())["policies"]
    # fcfs: the first runs until 6, the second is out of time by then.
    assert (fcfs["policy"], fcfs["num_done"], fcfs["num_ended_early"]) == ("fcfs", 1, 1)
    assert (fcfs["latency_p50"], fcfs["deadlines_met"], fcfs["num_preemptions"]) == (6.0, 0.0, 0)
    assert fcfs["urgent_ttft_p99"] is None
    # priority: the second has the steps from 1 to 3, the first ends two later.
    assert (priority["num_done"], priority["deadlines_met"]) == (2, 1.0)
    assert (priority["latency_p50"], priority["latency_p99"]) == (2.5, 8.0)
    assert (priority["urgent_ttft_p99"], priority["num_preemptions"]) == (1.5, 1)


def test_a_client_that_sends_little_in_a_trace(octavo_here: Command, tmp_path: Path) -> None:
    """One sequence at a time, a step a second: nine requests of one client, then one of another."""
    many = [{"arrival_ms": 0, "prompt_tokens": 9, "output_tokens": 2, "client": "a"}] * 9
    one = {"arrival_ms": 500, "prompt_tokens": 9, "output_tokens": 2, "client": "b"}
    costs = ("--step-ms", "1000", "--prefill-token-us", "0", "--decode-token-us", "0")
    costs += ("--context-token-us", "0", "--max-num-seqs", "1")
    output = tmp_path / "out.json"
    trace = write_trace(tmp_path / "trace.jsonl", *many, one)
    policies = ("--policies", "fcfs,fair")
    done = octavo_here("bench", "schedule", trace, *policies, *costs, "--output", output)
    assert done.returncode == 0, done.stderr
    fcfs, fair = json.loads(output.read_text())["policies"]
    # fcfs: "b" starts at 18 and has a token at 19. fair: it is the second; of "a" the fifth of
    # nine is the median, which starts at 10.
    assert (fcfs["worst_client_ttft_p50"], fair["worst_client_ttft_p50"]) == (18.5, 11.0)
    assert (fcfs["ttft_p99"], fair["ttft_p99"]) == (18.5, 19.0)


def test_a_made_up_trace_is_the_same_for_a_seed_and_parts_the_policies(
    octavo_here: Command, tmp_path: Path
) -> None:
    assert make_trace(20, 5.0, 1) == make_trace(20, 5.0, 1)
    assert make_trace(20, 5.0, 1) != make_trace(20, 5.0, 2)
    output = tmp_path / "out.json"
    done = octavo_here(
        *("bench", "schedule", "--num-requests", "200", "--rate", "20", "--output", output)
    )
    assert done.returncode == 0, done.stderr
    by_name = {row["policy"]: row for row in json.loads(output.read_text())["policies"]}
    assert list(by_name) == list(POLICIES)
    urgent = {name: row["urgent_ttft_p99"] for name, row in by_name.items()}
    assert urgent["priority"] < urgent["fcfs"] / 4
    assert urgent["edf"] < urgent["fcfs"] / 4
    assert by_name["shortest"]["latency_p50"] < by_name["fcfs"]["latency_p50"]


def test_what_planning_costs_is_measured(octavo_here: Command, tmp_path: Path) -> None:
    found = measure_overhead("priority", num_running=16, num_waiting=40, num_steps=20)
    assert (found.num_running, found.num_waiting, found.num_steps) == (16, 40, 20)
    assert 0.0 < found.median_ms <= found.p99_ms
    done = octavo_here("bench", "schedule", "--overhead", "--policies", "fcfs")
    assert done.returncode == 0, done.stderr
    assert "median ms a step" in done.stdout
    assert "1,000" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_of_256_is_planned_within_a_millisecond(policy: str) -> None:
    """The best of five medians: whatever else the machine does is not the scheduler's."""
    assert min(measure_overhead(policy).median_ms for _ in range(5)) < 1.0


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == percentile([3.0], 1) == 3.0
    assert percentile([], 50) is None


def test_max_tokens_are_the_output_unless_said(tmp_path: Path) -> None:
    row = {"arrival_ms": 1500, "prompt_tokens": 3, "output_tokens": 4}
    trace = read_trace(write_trace(tmp_path / "t", row, {**row, "max_tokens": 9}))
    assert [(t.arrival_seconds, t.max_tokens) for t in trace] == [(1.5, 4), (1.5, 9)]


ROW = {"arrival_ms": 0, "prompt_tokens": 3, "output_tokens": 4}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW, [1, 2]], ("line 2", "expected an object with arrival_ms")),
        ([{"arrival_ms": 0}], ("line 1", "expected an object with arrival_ms")),
        ([{**ROW, "user": "me"}], ("line 1", "expected an object with arrival_ms")),
        ([{**ROW, "client": 5}], ("line 1", "client must be a string, got 5")),
        ([{**ROW, "arrival_ms": "0"}], ("line 1", "arrival_ms must be a number")),
        ([{**ROW, "prompt_tokens": 0}], ("line 1", "prompt_tokens must be at least 1")),
        ([{**ROW, "deadline_ms": -1}], ("line 1", "deadline_ms must be above 0")),
        (
            [{**ROW, "prompt_tokens": 10**5}],
            ("request 0 of the trace needs 6251 KV blocks", "4096"),
        ),
        ([], ("holds no request",)),
    ],
)
def test_a_trace_that_is_none(
    octavo_here: Command, tmp_path: Path, rows: list[Any], words: tuple[str, ...]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", *rows)
    assert_refused(octavo_here("bench", "schedule", trace), *words)


def test_other_refusals(octavo_here: Command, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{\n")
    assert_refused(octavo_here("bench", "schedule", tmp_path / "t"), "line 1")
    assert_refused(octavo_here("bench", "schedule", tmp_path / "no"), "No such file")
    assert_refused(octavo_here("bench", "schedule", "--policies", "lifo"), "lifo", "fcfs")
    both = octavo_here("bench", "schedule", tmp_path / "t", "--overhead")
    assert_refused(both, "--overhead measures without a trace")


def test_the_second_word_is_a_command_and_else_a_model(octavo_here: Command) -> None:
    assert "octavo bench schedule" in octavo_here("bench", "schedule", "--help").stdout
    assert "octavo bench [OPTIONS] {model}" in octavo_here("bench", "--help").stdout
    assert_refused(octavo_here("bench", "./schedule"), "'schedule' is neither a path")
