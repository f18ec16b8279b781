"""Tables of results: on the terminal, and for docs/performance.md.

    python -m octavo.bench.report RESULTS.json... [--write PAGE.md]

With ``--write`` the tables replace what stands in the page between the two marks, so that no figure
there is ever typed by hand.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octavo.bench.results import Decode, Prefill, Profile, Results, Startup, Throughput
from octavo.ir.errors import OctavoError

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_MOST_KERNELS = 12
_WIDTH = 132  # of tables that go into a file or a pipe


@dataclass(frozen=True)
class Grid:
    """A table as text: title, heads of columns, rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def grids(results: Results) -> Iterator[Grid]:
    """A table for each kind of figure that there is."""
    if results.decode:
        yield _decode_grid(results.decode)
    if results.prefill:
        yield _prefill_grid(results.prefill)
    if results.throughput:
        yield _throughput_grid(results.throughput)
        yield from (_steps_grid(figure) for figure in results.throughput if figure.steps)
    if results.startup:
        yield _startup_grid(results.startup)
    yield from map(_profile_grid, results.profiles)


def _prefill_grid(prefills: Sequence[Prefill]) -> Grid:
    rows = [
        (f"{p.num_prompts} x {p.input_len}", f"{p.tokens_per_second:,.0f}", f"{p.share:.0%}")
        for p in prefills
    ]
    return Grid("Prefill", ("prompts", "tokens/s", "of roofline"), rows)


def _throughput_grid(throughputs: Sequence[Throughput]) -> Grid:
    rows = [
        (
            f"{t.num_requests} of {t.source}",
            f"{t.output_tokens_per_second:,.0f}",
            f"{t.total_tokens_per_second:,.0f}",
            f"{t.requests_per_second:.1f}",
            f"{t.seconds:.2f}",
        )
        for t in throughputs
    ]
    columns = ("requests at once", "output tokens/s", "all tokens/s", "requests/s", "s")
    return Grid("Throughput", columns, rows)


def _steps_grid(throughput: Throughput) -> Grid:
    rows = [
        (
            group.kind,
            f"{group.num_steps:,}",
            f"{group.seconds:.2f}",
            f"{group.seconds / group.num_steps * 1e3:.2f}",
        )
        for group in throughput.steps
    ]
    title = f"Steps of {throughput.num_requests} requests at once, by their sequences"
    return Grid(title, ("steps", "number", "s", "ms a step"), rows)


def _startup_grid(startups: Sequence[Startup]) -> Grid:
    names = list(startups[0].phases)
    rows = [
        [*(f"{s.phases.get(name, 0.0):.2f}" for name in names), f"{s.seconds:.2f}"]
        for s in startups
    ]
    return Grid("Process start to first token, s", [*names, "total"], rows)


def _decode_grid(decodes: Sequence[Decode]) -> Grid:
    columns = (
        *("engine", "batch", "in + out", "tokens/s", "range", "ms a step"),
        *("of roofline", "efficiency", "first token, ms"),
    )
    rows = [
        (
            d.engine,
            str(d.batch_size),
            f"{d.input_len} + {d.output_len}",
            f"{d.tokens_per_second:,.1f}",
            f"{d.slowest:,.1f} to {d.fastest:,.1f}",
            f"{d.step_ms:.3f}",
            _percent(d.share),
            _percent(d.efficiency),
            "" if d.first_token_ms is None else f"{d.first_token_ms:.1f}",
        )
        for d in decodes
    ]
    return Grid("Decode", columns, rows)


def _profile_grid(profile: Profile) -> Grid:
    shown = profile.kernels[:_MOST_KERNELS]
    rows = [
        (
            k.name,
            str(k.num_calls),
            f"{k.microseconds:,.1f}",
            "" if k.num_bytes is None else f"{k.num_bytes / 1e6:,.1f}",
            _percent(k.share),
        )
        for k in shown
    ]
    rest = profile.kernels[_MOST_KERNELS:]
    if rest:
        calls, spent = sum(k.num_calls for k in rest), sum(k.microseconds for k in rest)
        rows.append((f"{len(rest)} others", str(calls), f"{spent:,.1f}", "", ""))
    total = sum(k.microseconds for k in profile.kernels)
    rows.append(("all", str(sum(k.num_calls for k in profile.kernels)), f"{total:,.1f}", "", ""))
    title = (
        f"A decode step, batch {profile.batch_size}, context {profile.context}: {profile.method}"
    )
    return Grid(title, ("kernel", "calls", "us", "MB", "of bandwidth"), rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def heading(results: Results) -> list[str]:
    """Lines that say what ran where, and what the machine can do."""
    model, machine, roof = results.model, results.machine, results.roofline
    kind = f"{model.dtype}, {model.quantization}" if model.quantization else model.dtype
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    rate = machine.python_rate
    speed = "" if rate is None else f" ({rate / 1e6:.1f} M turns of a Python loop a second)"
    return [
        f"{model.name} ({model.architecture}), {kind}, {model.target}, "
        f"{model.load_format} weights, {model.artifact_id[:19]}",
        f"{machine.gpu or machine.cpu}, {machine.num_cpus} CPUs{speed}; {versions}; {machine.date}",
        f"Measured here: read {roof.read_rate / 1e9:,.1f} GB/s, copy {roof.copy_rate / 1e9:,.1f} "
        f"GB/s, {roof.dtype} matmul {roof.matmul_rate / 1e12:,.2f} TFLOP/s",
    ]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def print_grid(grid: Grid, console: Console | None = None) -> None:
    """A table on the terminal."""
    table = Table(*grid.columns, title=grid.title)
    for row in grid.rows:
        table.add_row(*row)
    (console or _console()).print(table)


def print_tables(results: Results, console: Console | None = None) -> None:
    """All tables on the terminal."""
    console = console or _console()
    for line in heading(results):
        console.print(line, highlight=False, soft_wrap=True)
    for grid in grids(results):
        print_grid(grid, console)
    for failure in results.failures:
        console.print(f"not measured: {failure}", highlight=False, markup=False, soft_wrap=True)


def to_markdown(results: Results) -> str:
    """All tables as Markdown, under a heading of the model's name."""
    first, *others = heading(results)
    lines = [f"### {first}", "", *(f"{line}.  " for line in others)]
    lines += ["", f"    {shlex.join(results.command)}", ""]
    for grid in grids(results):
        lines += [f"**{grid.title}**", "", _row(grid.columns), _row(["---"] * len(grid.columns))]
        lines += [*map(_row, grid.rows), ""]
    lines += [f"Not measured: {failure}  " for failure in results.failures]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write_into(page: Path, text: str) -> None:
    """Put tables between the page's marks. Raises OctavoError where they are missing."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OctavoError(f"{page}: the marks {BEGIN} and {END} are missing")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read results files, print their tables or write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    options = parser.parse_args(arguments)
    try:
        read = [Results.from_json(p.read_text(encoding="utf-8"), str(p)) for p in options.results]
        text = "\n".join(map(to_markdown, read))
        if options.write is None:
            print(text, end="")
        else:
            write_into(options.write, text)
    except (OctavoError, OSError) as error:
        sys.exit(f"octavo.bench.report: error: {error}")


if __name__ == "__main__":
    main()
