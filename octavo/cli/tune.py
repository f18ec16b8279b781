"""``octavo tune``: measure which kernels are fastest on this machine's GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.artifact import require_artifact

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.runtime.tune import Tuned, TuneReport
    from octavo.runtime.tune_steps import TunedStep


def tune(
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Begin no further measurement after so long; the rest stays."),
    ] = 300.0,
) -> None:
    """Measure every candidate of every kernel on this GPU and keep the fastest in the artifact.

    The choices go into plans/<gpu>.json, which is outside of the content id. Weights are not read.
    """
    require_artifact(directory)
    from octavo.runtime.tune import tune_artifact

    print_report(directory, tune_artifact(directory, seconds=seconds, show=_show))


def print_report(directory: Path, report: TuneReport) -> None:
    """What was chosen, how much faster it is than the default, and what was passed over."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 132)
    table = Table("module", "rows", "us", "default, us", "chosen", "tried")
    for tuned in report.tuned:
        table.add_row(*_row(tuned))
    console.print(table)
    _print_steps(console, report.steps)
    for tuned in report.tuned:
        for trial in tuned.trials:
            if trial.problem is not None:
                where = f"{tuned.module}, {tuned.rows} rows, {_text(trial.candidate)}"
                console.print(f"passed over: {where}: {trial.problem}", markup=False)
    if report.num_skipped:
        console.print(f"time was up: {report.num_skipped} row buckets stay as they were")
    if report.stopped is not None:
        console.print(f"stopped by a fault of the GPU at {report.stopped}", markup=False)
    console.print(f"written to {directory / report.path}", markup=False, soft_wrap=True)


def _print_steps(console: Console, steps: list[TunedStep]) -> None:
    """Decode steps as wholes, and which modules have another candidate in them."""
    from rich.table import Table

    if not steps:
        return
    table = Table("decode step, rows", "ms", "defaults, ms", "fastest alone, ms", "not that for")
    for step in steps:
        times = (step.chosen, step.default, step.alone)
        table.add_row(str(step.rows), *(f"{t * 1e3:.3f}" for t in times), ", ".join(step.changed))
    console.print(table)


def _row(tuned: Tuned) -> tuple[str, ...]:
    times = {_text(trial.candidate): trial.seconds for trial in tuned.trials}
    return (
        tuned.module,
        str(tuned.rows),
        _microseconds(times.get(_text(tuned.chosen))),
        _microseconds(times.get(_text(tuned.default))),
        _text(tuned.chosen),
        str(len(tuned.trials)),
    )


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def _text(candidate: dict[str, object]) -> str:
    pairs = ((n, v if isinstance(v, str) else json.dumps(v)) for n, v in candidate.items())
    return " ".join(f"{name}={value}" for name, value in pairs)


def _show(text: str) -> None:
    """How far it is, for whoever waits at a terminal."""
    if sys.stderr.isatty():
        print(f"octavo tune: {text}", file=sys.stderr)
