"""What a finished program is held to, and what quantising it has cost."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from octavo.codegen.generate import Generated
from octavo.codegen.weights import WrittenWeights
from octavo.evaluate.loss_file import measure_loss
from octavo.frontend.check_trace import TraceCheck, check_rounded
from octavo.frontend.kv_scales import head_constants
from octavo.frontend.trace import BoundWeights
from octavo.golden import golden_json, quantized_golden_json
from octavo.ir.graph import Graph
from octavo.job import Job
from octavo.memory import release_memory
from octavo.runtime.artifact import Artifact
from octavo.runtime.self_check import check_golden

logger = logging.getLogger(__name__)

LOSS_TOKENS = 1024  # on which the loss is measured where nothing else is said


def with_rounded_cache(
    job: Job,
    graph: Graph,
    weights: BoundWeights,
    check: TraceCheck,
) -> TraceCheck:
    """Hugging Face's answers with a KV cache of codes, if the program has one."""
    if job.kv.scheme is None:
        return check
    with job.phases("compare with Hugging Face"):
        heads = head_constants(graph, weights.buffers)
        config, source = job.source.config, weights.source
        rows, bound = check_rounded(config, job.dtype, source, check.prompts, job.kv.scheme, heads)
        release_memory()
    return replace(check, rows=tuple(rows), bound=bound)


def write_golden(job: Job, graph: Graph, check: TraceCheck, generated: Generated) -> None:
    """What the program is held to: of a quantised model, its own graph."""
    if not generated.layouts:
        job.writer.write_text("tests/golden.json", golden_json(check))
        return
    with job.phases("interpret the quantised graph"):
        stored = WrittenWeights(job.writer.directory / "weights")
        text = quantized_golden_json(check, graph, stored, generated.layouts)
        job.writer.write_text("tests/golden.json", text)
        release_memory()


def check_program(job: Job) -> None:
    """Run the finished program, where there is a device for it and there are weights."""
    if not job.with_weights:
        return
    if job.targets.main.kind == "cuda" and not torch.cuda.is_available():
        logger.warning(
            "the program was not run: this machine has no GPU; run `octavo check %s` on one",
            job.writer.output,
        )
        return
    check_golden(Artifact.open(job.writer.directory))


def measured_loss(job: Job, generated: Generated) -> str | None:
    """What quantising costs, as tests/loss.json says it, where there is a device and a text."""
    if job.loss_tokens == 0:
        return None
    reason, text = _why_no_loss(job, generated), None
    if reason is None:
        with job.phases("measure the loss"):
            text = measure_loss(job.writer.directory, job.source, job.loss_tokens or LOSS_TOKENS)
        reason = "the model has no tokenizer" if text is None else None
    if reason is not None and job.loss_tokens is not None:
        logger.warning("--loss-tokens has no effect: %s", reason)
    return text


def _why_no_loss(job: Job, generated: Generated) -> str | None:
    if not generated.layouts:
        return "nothing is quantised"
    if not job.with_weights:
        return "no weights are stored"
    if job.source.kind == "random":
        return "the weights are random"
    if job.targets.main.kind == "cuda" and not torch.cuda.is_available():
        return "this machine has no GPU; run `octavo evaluate` on one"
    return None
