"""``octavo bench``: how fast a model runs here, and how far from this machine's limits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.counts import parse_counts
from octavo.ir.errors import OctavoError

_DEFAULT_BATCH_SIZES = "1,4,8,16"


def bench(
    model: Annotated[
        str,
        typer.Argument(
            help="An artifact directory, or what `octavo compile` takes; a config.json runs with "
            "random weights."
        ),
    ],
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help=f"Measure decode at these batch sizes; {_DEFAULT_BATCH_SIZES} where nothing else "
            "is asked for.",
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of each request.")] = 256,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="NxL", help="Measure the prefill of N prompts of L tokens."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="Measure all requests of this JSON list of [prompt length, output length] at once."
        ),
    ] = None,
    startup: Annotated[
        bool, typer.Option("--startup", help="Measure process start to first token.")
    ] = False,
    compare_hf: Annotated[
        bool, typer.Option("--compare-hf", help="Run Hugging Face generate on the same batches.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="List the kernels of a decode step at these batch sizes (GPU)."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Take the median of so many runs.")] = 3,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="What a model that is not yet compiled is to compute in."),
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="The quantisation that the artifact must have.")
    ] = None,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="dummy: random weights, as fast as real ones; none are read."),
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the GPU's memory to use.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures to this JSON file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw decode over batch size into this PNG file.")
    ] = None,
) -> None:
    """Measure decode, prefill, throughput and start-up, each against the roofline measured here.

    Decode leaves the prefill out: it is timed over those steps in which all requests of the batch
    get one token each and nothing else happens. Prompts are random ids, sampling is greedy, and an
    end of sequence ends nothing.
    """
    from octavo.bench.plot import draw, require_matplotlib
    from octavo.bench.report import print_tables
    from octavo.bench.results import write_results
    from octavo.bench.suite import Plan, Suite, artifact_of
    from octavo.bench.workload import read_lengths

    if plot is not None:
        require_matplotlib()
    others = prefill or requests is not None or startup or profile is not None
    if batch_size is None:
        batch_size = None if others and not compare_hf else _DEFAULT_BATCH_SIZES
    options: dict[str, Any] = {"load_format": load_format, "quantization": quantization}
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    plan = Plan(
        batch_sizes=parse_counts("--batch-size", batch_size) if batch_size is not None else (),
        input_len=input_len,
        output_len=output_len,
        prefill=tuple(map(_prompts, prefill or ())),
        requests=tuple(read_lengths(requests)) if requests is not None else (),
        requests_name=requests.name if requests is not None else "",
        startup=startup,
        compare_hf=compare_hf,
        profile=parse_counts("--profile", profile) if profile is not None else (),
        repeats=repeats,
        options=options,
    )
    with artifact_of(model, dtype=dtype, dummy=load_format == "dummy") as path:
        results = Suite(path, plan, ["octavo", *sys.argv[1:]], show=_show).run()
    print_tables(results)
    if output is not None:
        write_results(results, output)
    if plot is not None:
        draw(results, plot)


def _prompts(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise OctavoError(f"--prefill {text!r}: expected prompts x length, such as 16x2048")
    return int(match[1]), int(match[2])


def _show(text: str) -> None:
    """What is being measured, for whoever waits at a terminal."""
    if sys.stderr.isatty():
        print(f"octavo bench: {text}", file=sys.stderr)
