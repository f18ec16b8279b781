"""``octavo compile``: a model in, an artifact directory out."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

TUNE_SECONDS = 300.0
EXIT_TERMINATED = 128 + signal.SIGTERM


def compile_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a GGUF file, a config.json with --random-weights, or a hub id."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The artifact directory to write.")
    ],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="What the model computes in; auto suits the target."),
    ] = "auto",
    target: Annotated[
        str,
        typer.Option(
            help="What kernels are made for: cpu, cuda (this machine's GPU), cuda:sm_90 ..., "
            "several with commas; auto looks at this machine. No GPU is needed."
        ),
    ] = "auto",
    random_weights: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Random weights from this seed; none are read."),
    ] = None,
    with_weights: Annotated[
        bool,
        typer.Option(
            "--weights/--no-weights",
            help="Without: store shapes only, for benchmarks with --load-format dummy.",
        ),
    ] = True,
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        typer.Option(help="What the KV cache holds: auto is the model's dtype, the others codes."),
    ] = "auto",
    kv_scale_per: Annotated[
        Literal["head", "token"] | None,
        typer.Option(
            help="What has a scale of its own in a KV cache of codes: each KV head (as fp8 has), "
            "or each token and head (as int8 has)."
        ),
    ] = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|checkpoint",
            help="Where the scales of heads are: a safetensors file, or the model's own; without, "
            "they are 1.",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune/--no-tune", help="Measure kernels where this machine has the GPU."),
    ] = True,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the output directory if it exists.")
    ] = False,
) -> None:
    """Compile a model into an artifact directory.

    GPU kernels are compiled by one process for each processor; OCTAVO_COMPILE_WORKERS sets
    another number.
    """
    with _keeping_what_is_made():
        from octavo.compile import compile_model

    with _ending_on_sigterm():
        report = compile_model(
            model,
            output,
            dtype=dtype,
            target=target,
            random_weights=random_weights,
            with_weights=with_weights,
            tune_seconds=TUNE_SECONDS if tune else 0.0,
            revision=revision,
            force=force,
            kv_cache_dtype=kv_cache_dtype,
            kv_scale_per=kv_scale_per,
            kv_scales=kv_scales,
        )
    print(f"{report.output}: {report.total_bytes / 2**20:.1f} MiB in {report.seconds:.1f} s")
    print(report.artifact_id)
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.stages))


@contextmanager
def _keeping_what_is_made() -> Iterator[None]:
    """For imports: looking for garbage among what they make takes a second, and there is none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the compile by an exception, so that what was written is removed."""

    def end(*_: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
