"""``octavo bench serve``: what the server costs for each streamed token, the model not counted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.artifact import require_artifact
from octavo.cli.counts import parse_counts
from octavo.cli.serve import require_packages


def bench_serve(
    directory: Annotated[
        Path, typer.Argument(help="An artifact directory with a tokenizer and a chat template.")
    ],
    streams: Annotated[
        str, typer.Option(metavar="N,N,...", help="Measure so many clients at once.")
    ] = "1,8,64,256",
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each stream.")] = 256,
    step_ms: Annotated[
        float, typer.Option(min=0.0, help="What a step is to take, in which nothing is done.")
    ] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Take the median of so many runs.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures to this JSON file.")
    ] = None,
) -> None:
    """Stream to clients in another process, with a model whose steps take their time and no work.

    The server's processor time is that of all its threads but the engine's, and the engine's for
    handing over its outputs. Starting the requests is a part of it.
    """
    require_packages()
    require_artifact(directory)

    from octavo.bench.report import print_grid
    from octavo.bench.serve import measure_server, server_grid, to_json

    costs = measure_server(
        directory,
        parse_counts("--streams", streams),
        num_tokens=output_len,
        step_ms=step_ms,
        repeats=repeats,
    )
    print_grid(server_grid(costs))
    if output is not None:
        output.write_text(to_json(costs), encoding="utf-8")
