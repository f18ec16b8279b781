"""``octavo bench schedule``: what a scheduling policy does to a service, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.ir.errors import OctavoError


def bench_schedule(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Requests as JSON lines with arrival_ms, prompt_tokens, output_tokens, and maybe "
            "max_tokens, priority, deadline_ms, queue_timeout_ms, client. Made up where none is "
            "given."
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="NAME,...", help="Compare these policies.")
    ] = "fcfs,priority,edf,shortest,fair",
    num_requests: Annotated[int, typer.Option(min=1, help="Of a trace that is made up.")] = 500,
    rate: Annotated[float, typer.Option(min=0.001, help="Its requests a second.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of its random lengths and arrivals.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens a step.")] = 2048,
    num_blocks: Annotated[int, typer.Option(min=1, help="Blocks of KV cache.")] = 4096,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    ageing_ms: Annotated[
        float, typer.Option(min=1.0, help="What waiting is worth: see docs/scheduling.md.")
    ] = 60_000.0,
    step_ms: Annotated[float, typer.Option(min=0.0, help="What a step costs by itself.")] = 10.0,
    prefill_token_us: Annotated[float, typer.Option(min=0.0, help="And a prompt token.")] = 50.0,
    decode_token_us: Annotated[float, typer.Option(min=0.0, help="And a decoded one.")] = 50.0,
    context_token_us: Annotated[
        float, typer.Option(min=0.0, help="And a token of context that is read.")
    ] = 0.01,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead",
            help="Measure instead what planning a step costs at 256 running and 1,000 waiting.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures to this JSON file.")
    ] = None,
) -> None:
    """Replay a trace through the real scheduler under each policy, with a cost model as the device.

    TTFT is the time to the first token. Those that ended early ran out of time.
    """
    from octavo.bench.report import print_grid
    from octavo.bench.schedule import (
        compare,
        make_trace,
        measure_overhead,
        overhead_grid,
        policy_grid,
        read_trace,
        to_json,
    )
    from octavo.runtime.policies import POLICIES
    from octavo.runtime.schedule_simulator import CostModel
    from octavo.runtime.scheduler import SchedulerConfig

    if overhead and trace is not None:
        raise OctavoError("--overhead measures without a trace; leave one of the two out")
    chosen = policies.split(",")
    for name in chosen:
        if name not in POLICIES:
            raise OctavoError(f"--policies {policies!r}: {name!r} is none of {', '.join(POLICIES)}")
    figures, overheads = [], []
    if overhead:
        overheads = [measure_overhead(name) for name in chosen]
        print_grid(overhead_grid(overheads))
    else:
        figures = compare(
            read_trace(trace) if trace is not None else make_trace(num_requests, rate, seed),
            [
                SchedulerConfig(
                    max_num_seqs,
                    max_num_batched_tokens,
                    policy=name,
                    ageing_seconds=ageing_ms / 1e3,
                )
                for name in chosen
            ],
            num_blocks=num_blocks,
            block_size=block_size,
            cost=CostModel(step_ms, prefill_token_us, decode_token_us, context_token_us),
        )
        print_grid(policy_grid(figures))
    if output is not None:
        output.write_text(to_json(figures, overheads), encoding="utf-8")
