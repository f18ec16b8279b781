"""Everything that docs/performance.md says of an H200, in one call on that machine.

    python -m benchmarks.h200.run ARTIFACT... --output DIR [--seconds 540] [--tune 120] [--only ...]

Artifacts need no weights: they are run with random ones. For each, DIR gets ``<artifact>.json``,
written anew after each part, so that a run that is cut off has lost one part. Each artifact is
tuned in one process and measured in another. What fails is noted and the rest goes on; no part is
begun when the time is up. The tables are printed last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.bench.report import print_tables
from octavo.bench.results import Results, write_results
from octavo.bench.suite import Plan, Suite
from octavo.bench.workload import read_lengths
from octavo.ir.errors import OctavoError

REQUESTS = Path(__file__).with_name("requests_500.json")
PLAN = Plan(
    batch_sizes=(1, 8, 32, 128, 256),
    input_len=512,
    output_len=256,
    prefill=((16, 2048),),
    requests=tuple(read_lengths(REQUESTS)),
    requests_name=REQUESTS.name,
    startup=True,
    profile=(1, 32, 256),
    options={"load_format": "dummy"},
)
# The parts by name, and what a plan has without them.
PARTS = {
    "decode": {"batch_sizes": ()},
    "prefill": {"prefill": ()},
    "requests": {"requests": ()},
    "startup": {"startup": False},
    "profile": {"profile": ()},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each artifact in the time that is left, shared out evenly."""
    options = _options(arguments)
    command = shlex.split("python -m benchmarks.h200.run")
    command += sys.argv[1:] if arguments is None else arguments
    end = time.monotonic() + options.seconds
    plan = _plan(options)
    found: list[Results] = []
    for number, artifact in enumerate(options.artifacts):
        own_end = time.monotonic() + (end - time.monotonic()) / (len(options.artifacts) - number)
        if options.tune:
            seconds = min(options.tune, own_end - time.monotonic())
            if not in_own_process(tune, artifact, seconds, options.output):
                print(f"{artifact}: not tuned", flush=True)
        results = _measured(artifact, plan, command, options.output, own_end - time.monotonic())
        if results is not None:
            found.append(results)
    for results in found:
        print_tables(results)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h200.run", description=__doc__)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="tune before")
    parser.add_argument("--only", choices=[*PARTS], nargs="+", default=[*PARTS])
    parser.add_argument("--batch-size", type=int, nargs="+", help="other batch sizes")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    plan = replace(PLAN, repeats=options.repeats)
    if options.batch_size:
        plan = replace(plan, batch_sizes=tuple(options.batch_size))
    for name, without in PARTS.items():
        if name not in options.only:
            plan = replace(plan, **without)
    return plan


def in_own_process(target: Callable[..., object], *arguments: object) -> bool:
    """Call a function in a new process of this interpreter; whether it ended well.

    What it prints goes where our output goes. A process that has tuned or measured is no place to
    measure in: collections walk through all that is left in its heap, and after a fault its GPU is
    of no use to it.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # only when we were interrupted is there anything to end
    return process.exitcode == 0


def _measured(
    artifact: Path, plan: Plan, command: list[str], output: Path, seconds: float
) -> Results | None:
    """What a process of its own has measured; also what one that failed had saved until then."""
    path = output / f"{artifact.name}.json"
    before = _written_at(path)
    ended_well = in_own_process(measure, artifact, plan, command, path, seconds)
    if _written_at(path) == before:
        print(f"{artifact}: not measured", flush=True)
        return None
    if not ended_well:
        print(f"{artifact}: its process failed, not all is measured", flush=True)
    try:
        return Results.from_json(path.read_text("utf-8"), str(path))
    except OctavoError as error:  # it ended while it wrote
        print(f"{artifact}: not measured: {error}", flush=True)
        return None


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def measure(artifact: Path, plan: Plan, command: list[str], path: Path, seconds: float) -> None:
    """Measure one artifact, and write its results into ``path`` after each part."""
    start = time.monotonic()

    def show(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {artifact.name}: {text}", flush=True)

    Suite(
        artifact,
        plan,
        command,
        show=show,
        save=lambda results: write_results(results, path),
        seconds=seconds,
    ).run()


def tune(artifact: Path, seconds: float, output: Path) -> None:
    """Tune an artifact, and carry the plan home beside the figures."""
    from octavo.cli.tune import print_report
    from octavo.runtime.tune import tune_artifact

    report = tune_artifact(artifact, seconds=seconds)
    print_report(artifact, report)
    goal = output / artifact.name / report.path.name
    goal.parent.mkdir(parents=True, exist_ok=True)
    goal.write_bytes((artifact / report.path).read_bytes())


if __name__ == "__main__":
    main()
