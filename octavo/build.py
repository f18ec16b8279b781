"""The phases of a compile, in order: from a model that was found to a checked artifact."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo.calibrate.auto import AutoRecipe
from octavo.calibrate.plan import AUTO_SCHEMES, CalibrationRequest, Planned, plan_quantization
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.cpu_rules import DEQUANTIZED_AT_LOAD
from octavo.codegen.generate import Generated, generate
from octavo.codegen.target import Targets
from octavo.codegen.weights import WrittenWeights
from octavo.evaluate.loss_file import LOSS_FILE, measure_loss
from octavo.frontend.accounting import account
from octavo.frontend.check_trace import TraceCheck, check_rounded, check_trace
from octavo.frontend.kv_scales import head_scales, load_kv_scales
from octavo.frontend.model_files import write_model_files
from octavo.frontend.read_codes import read_codes
from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.source import ModelSource, open_weights
from octavo.frontend.trace import BoundWeights, Imported, import_model
from octavo.golden import golden_json, quantized_golden_json
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.manifest import BLOCK_GROUPS, Manifest, num_groups
from octavo.ir.types import DTYPE_NAMES
from octavo.ir.weight_cache import WeightSource
from octavo.kv_options import KVOptions
from octavo.memory import release_memory
from octavo.passes.pipeline import Stage, run_pipeline
from octavo.passes.quant_recipe import Quantization, Recipe
from octavo.phases import Phases
from octavo.quantize import count_schemes, find_schemes, unquantized_notices
from octavo.runtime.artifact import Artifact
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import write_binaries
from octavo.runtime.record_program import record_program
from octavo.runtime.self_check import check_golden
from octavo.source_tokenizer import source_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What one compile works on and with."""

    source: ModelSource
    dtype: torch.dtype
    targets: Targets
    writer: ArtifactWriter
    phases: Phases
    with_weights: bool
    recipe: Recipe | None
    calibration: CalibrationRequest
    loss_tokens: int
    dequantize: bool
    kv: KVOptions


def build_artifact(job: Job) -> tuple[Manifest, AutoRecipe | None]:
    """Write the artifact; returns its manifest, and the recipe that a budget led to."""
    imported = _traced(job)
    weights, check = _weights(job, imported)
    codes = job.writer.directory / "codes"  # as long as weights are written
    planned = _planned(job, imported, weights, codes)
    _rewrite(job, imported, planned.quantization)
    generated = _generated(job, imported.graph, planned.weights)
    shutil.rmtree(codes, ignore_errors=True)
    if check is not None:
        if not generated.layouts:
            check = _with_rounded_cache(job, imported, weights, check)
        _write_golden(job, imported.graph, check, generated)
    fields = _fields(job, imported, generated, planned.quantization.recipe)
    _compile_kernels(job, fields)
    manifest = job.writer.finish(**fields)
    with job.phases("check the program"):
        _check(job, manifest)
    loss = _measured_loss(job) if generated.layouts else None
    if loss is not None:
        manifest = job.writer.add_text(manifest, LOSS_FILE, loss)
    return manifest, planned.auto


def _traced(job: Job) -> Imported:
    with job.phases("trace"):
        imported = import_model(job.source.config, job.dtype)
        for notice in imported.notices:
            logger.warning("%s", notice)
    return imported


def _weights(job: Job, imported: Imported) -> tuple[BoundWeights, TraceCheck | None]:
    """The graph's weights, after Hugging Face's own run with them, which the graph must match."""
    with job.phases("account for the weights"):
        checkpoint = open_weights(job.source, imported.model)
        account(imported.model, checkpoint)
        if not job.dequantize:
            for notice in checkpoint.notices():
                logger.warning("%s", notice)
            imported.buffers.update(read_codes(imported.graph, checkpoint))
        weights = BoundWeights(checkpoint, imported.buffers, checkpoint)
    if not job.with_weights:
        return weights, None
    with job.phases("compare with Hugging Face"):
        check = check_trace(imported, job.source.config, job.dtype, checkpoint)
        release_memory()
    return weights, check


def _planned(job: Job, imported: Imported, weights: BoundWeights, codes: Path) -> Planned:
    """What is quantised and how, by a calibration if one is asked for."""
    request = job.calibration
    target = job.targets.main
    found = Quantization(job.recipe, why_no_kernel=target.why_no_kernel, can_embed=target.can_embed)
    if not job.with_weights or (request.text is None and request.budget_gb is None):
        return Planned(found, weights)
    with job.phases("calibrate") as tell:
        tokenizer = source_tokenizer(job.source)
        if tokenizer is None:
            raise OctavoError("the model has no tokenizer: no text can calibrate it")
        codes.mkdir()
        planned = plan_quantization(
            imported,
            weights,
            found,
            request,
            target=target.kind,
            tokenizer=tokenizer,
            folder=codes,
            schemes=find_schemes(AUTO_SCHEMES, DTYPE_NAMES[job.dtype], job.targets.every),
            progress=tell,
        )
        release_memory()
    return planned


def _rewrite(job: Job, imported: Imported, quantization: Quantization) -> None:
    """Run the passes on the graph, and write its stages."""
    graph = imported.graph
    with job.phases("rewrite"):
        stages = run_pipeline(
            graph,
            max_position=imported.max_position,
            target=job.targets.main.kind,
            quantization=quantization,
            kv_scheme=job.kv.scheme,
            has_kv_scales=job.kv.has_head_scales,
        )
        _refuse_unpaged(graph, stages)
        if job.recipe is not None:
            for notice in unquantized_notices(job.recipe, stages):
                logger.warning("%s", notice)
        job.writer.write_stages(stages)
        if job.kv.scales is not None:
            imported.buffers.update(load_kv_scales(graph, job.source, job.kv.scales))


def _refuse_unpaged(graph: Graph, stages: list[Stage]) -> None:
    """A model whose attention could not be paged has no step. Says what the pass said."""
    if not graph.find("attention"):
        return
    [stage] = [stage for stage in stages if stage.name == "page-attention"]
    raise RefusedArchitecture(f"its attention cannot use a paged cache: {stage.summary}")


def _generated(job: Job, graph: Graph, weights: WeightSource) -> Generated:
    """Write the program, its kernels and its weights, and what goes with the model."""
    with job.phases("write kernels and weights"):
        generated = generate(
            graph,
            job.targets.main,
            job.writer.directory,
            weights,
            without_checkpoint=not job.with_weights,
        )
        write_model_files(job.source, job.writer.directory / "model")
        release_memory()
    _tell_dequantized(generated)
    return generated


def _tell_dequantized(generated: Generated) -> None:
    """Say it once where weights take the memory of whole ones."""
    schemes = {
        str(kernel.constants["scheme"])
        for kernel in generated.kernels
        if kernel.template.endswith(f"/{DEQUANTIZED_AT_LOAD}.py.j2")
    }
    if schemes:
        logger.warning(
            "the cpu target has no products of %s: such weights are dequantised when they are"
            " loaded, and take as much memory as whole ones",
            " and ".join(sorted(schemes)),
        )


def _with_rounded_cache(
    job: Job, imported: Imported, weights: BoundWeights, check: TraceCheck
) -> TraceCheck:
    """Hugging Face's answers with a KV cache of codes, if the program has one."""
    if job.kv.scheme is None:
        return check
    with job.phases("compare with Hugging Face"):
        scales = head_scales(imported.graph, imported.buffers)
        config, source = job.source.config, weights.source
        rows, bound = check_rounded(config, job.dtype, source, check.prompts, job.kv.scheme, scales)
        release_memory()
    return replace(check, rows=tuple(rows), bound=bound)


def _write_golden(job: Job, graph: Graph, check: TraceCheck, generated: Generated) -> None:
    """What the program is held to: of a quantised model, its own graph."""
    if not generated.layouts:
        job.writer.write_text("tests/golden.json", golden_json(check))
        return
    with job.phases("interpret the quantised graph"):
        stored = WrittenWeights(job.writer.directory / "weights")
        text = quantized_golden_json(check, graph, stored, generated.layouts)
        job.writer.write_text("tests/golden.json", text)
        release_memory()


def _fields(
    job: Job, imported: Imported, generated: Generated, recipe: Recipe | None
) -> dict[str, Any]:
    """What the manifest says besides its files."""
    return {
        "architecture": type(imported.model).__name__,
        "model_type": job.source.config.model_type,
        "target": job.targets.main.name,
        "dtype": str(job.dtype).removeprefix("torch."),
        "quantization": recipe.name if recipe else None,
        "quant_schemes": count_schemes(imported.graph),
        "vocab_size": imported.graph.outputs[0].shape[-1],
        "max_position": imported.max_position,
        "kv_slots": generated.kv_slots,
        "required_features": (BLOCK_GROUPS,) if num_groups(generated.kv_slots) > 1 else (),
        "kv_scheme": None if job.kv.scheme is None else str(job.kv.scheme),
        "source": job.source.name,
        "revision": job.source.revision,
        "producer": _producer(uses_triton=job.targets.main.kind == "cuda"),
    }


def _producer(uses_triton: bool) -> dict[str, str]:
    packages = ("torch", "transformers", *(("triton",) if uses_triton else ()))
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"octavo": octavo.__version__, **versions}


def _compile_kernels(job: Job, fields: dict[str, Any]) -> None:
    """Make the binaries of the GPUs that are compiled for."""
    if not job.targets.archs:
        return
    with job.phases("compile kernels"):
        draft, directory = job.writer.draft(**fields), job.writer.directory
        launches = {arch: record_program(directory, draft, arch=arch) for arch in job.targets.archs}
        write_binaries(launches, directory / "kernels" / "bin", cache=BinaryCache())


def _check(job: Job, manifest: Manifest) -> None:
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


def _measured_loss(job: Job) -> str | None:
    """What quantising costs, as tests/loss.json says it, where there is a device and a text."""
    can_run = job.targets.main.kind == "cpu" or torch.cuda.is_available()
    if not (job.with_weights and can_run and job.loss_tokens) or job.source.kind == "random":
        return None
    with job.phases("measure the loss"):
        return measure_loss(job.writer.directory, job.source, job.loss_tokens)
