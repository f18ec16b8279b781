"""Everything that docs/performance.md says of an H200, in one call on that machine.

    python -m benchmarks.h200.run ARTIFACT... --output DIR [--seconds 540] [--tune 120] [--only ...]

Artifacts need no weights: they are run with random ones. For each, DIR gets ``<artifact>.json``,
written anew after each part, so that a run that is cut off has lost one part. What fails is noted
and the rest goes on; no part is begun when the time is up. The tables are printed last.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octavo.bench.report import print_tables
from octavo.bench.results import Results, write_results
from octavo.bench.suite import Plan, Suite
from octavo.bench.workload import read_lengths

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
    end = time.monotonic() + options.seconds
    plan = _plan(options)
    found: list[Results] = []
    for number, artifact in enumerate(options.artifacts):
        share = (end - time.monotonic()) / (len(options.artifacts) - number)
        try:
            found.append(_measure(artifact, plan, options, share))
        except Exception:
            print(f"{artifact}: not measured", flush=True)
            traceback.print_exc(limit=-4, file=sys.stdout)
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


def _measure(artifact: Path, plan: Plan, options: argparse.Namespace, share: float) -> Results:
    start = time.monotonic()

    def show(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {artifact.name}: {text}", flush=True)

    if options.tune:
        _tune(artifact, min(options.tune, share), options.output)
    path = options.output / f"{artifact.name}.json"
    command = shlex.split("python -m benchmarks.h200.run") + sys.argv[1:]
    suite = Suite(
        artifact,
        plan,
        command,
        show=show,
        save=lambda results: write_results(results, path),
        seconds=share - (time.monotonic() - start),
    )
    return suite.run()


def _tune(artifact: Path, seconds: float, output: Path) -> None:
    """Tune first, and carry the plan home beside the figures."""
    from octavo.cli.tune import print_report
    from octavo.runtime.tune import tune_artifact

    try:
        report = tune_artifact(artifact, seconds=seconds)
    except Exception:
        print(f"{artifact}: not tuned", flush=True)
        traceback.print_exc(limit=-4, file=sys.stdout)
        return
    print_report(artifact, report)
    goal = output / artifact.name / report.path.name
    goal.parent.mkdir(parents=True, exist_ok=True)
    goal.write_bytes((artifact / report.path).read_bytes())


if __name__ == "__main__":
    main()
