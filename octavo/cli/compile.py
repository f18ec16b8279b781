"""``octavo compile``: a model in, an artifact directory out."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octavo.ir.errors import OctavoError

if TYPE_CHECKING:
    from octavo.calibrate.plan import CalibrationRequest
    from octavo.compile import CompileReport

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
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="How linears are quantised: int8, int4, int4-g32, int4-g64, int4-asym, fp8, "
            "fp8-tensor, fp8-block, int8-w8a8, mxfp4, nf4, balanced, auto with --budget-gb, or a "
            ".yaml recipe.",
        ),
    ] = None,
    quant_head: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How the LM head is quantised; left out, it is not."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text with which codes are chosen."),
    ] = None,
    quant_method: Annotated[
        Literal["rtn", "gptq", "awq"] | None,
        typer.Option(help="How codes are chosen; gptq with --calibration, else rtn: to nearest."),
    ] = None,
    calibration_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of the text, spread over all of it; 128 without this."),
    ] = None,
    calibration_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each sample; 512 without this.")
    ] = None,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="GPTQ: columns of the largest inputs first.")
    ] = False,
    budget_gb: Annotated[
        float | None,
        typer.Option(metavar="N", help="With --quant auto: 10^9 bytes that all weights may take."),
    ] = None,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of a text on which a quantised artifact is compared, 1024 without this; 0 "
            "for none.",
        ),
    ] = None,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="Read a quantised checkpoint as numbers; its codes are not kept."
        ),
    ] = False,
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
    kv_calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|passage",
            help="Text, or that which comes with Octavo, that shows what keys have in common: fp8 "
            "then takes it off them. For contexts of up to some 2,000 tokens.",
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

    if quant_method == "rtn" and quant is None and quant_head is None:
        raise OctavoError("--quant-method without --quant: say what to quantise to")
    with _ending_on_sigterm():
        report = compile_model(
            model,
            output,
            dtype=dtype,
            target=target,
            quant=quant,
            quant_head=quant_head,
            calibration=_calibration(
                calibration,
                quant_method,
                (calibration_samples, calibration_length),
                act_order,
                budget_gb,
            ),
            loss_tokens=loss_tokens,
            dequantize=dequantize,
            random_weights=random_weights,
            with_weights=with_weights,
            tune_seconds=TUNE_SECONDS if tune else 0.0,
            revision=revision,
            force=force,
            kv_cache_dtype=kv_cache_dtype,
            kv_scale_per=kv_scale_per,
            kv_scales=kv_scales,
            kv_calibration=kv_calibration,
        )
    _print_report(report)


def _calibration(
    text: Path | None,
    method: Literal["rtn", "gptq", "awq"] | None,
    samples: tuple[int | None, int | None],
    act_order: bool,
    budget_gb: float | None,
) -> CalibrationRequest:
    """What the options about choosing codes come to; ``samples`` are their number and length."""
    from octavo.calibrate.calibrate import Calibration
    from octavo.calibrate.gptq import GPTQOptions
    from octavo.calibrate.plan import CalibrationRequest
    from octavo.calibrate.sequences import CalibrationOptions

    names = ("num_samples", "length")
    given = {name: value for name, value in zip(names, samples, strict=True) if value is not None}
    chosen = Calibration(
        method or ("gptq" if text else "rtn"),
        CalibrationOptions(**given) if given else None,
        GPTQOptions(act_order=act_order),
    )
    return CalibrationRequest(text, chosen, budget_gb)


def _print_report(report: CompileReport) -> None:
    print(f"{report.output}: {report.total_bytes / 2**20:.1f} MiB in {report.seconds:.1f} s")
    print(report.artifact_id)
    if report.recipe is not None:
        print(f"the recipe that was chosen, to edit and give to --quant: {report.recipe}")
        print(report.recipe.read_text("utf-8"), end="")
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
