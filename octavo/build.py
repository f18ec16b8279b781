"""The phases of a compile, in order: from a model that was found to a checked artifact."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import octavo
from octavo.calibrate.auto import AutoRecipe
from octavo.calibrate.calibrate import graph_before_quantization
from octavo.calibrate.key_offsets import find_key_offsets, offset_buffers
from octavo.calibrate.kv_samples import read_kv_samples
from octavo.calibrate.plan import (
    AUTO_SCHEMES,
    Planned,
    check_budget,
    plan_quantization,
    read_samples,
)
from octavo.codegen.cpu_rules import DEQUANTIZED_AT_LOAD
from octavo.codegen.generate import Generated, generate
from octavo.evaluate.loss_file import LOSS_FILE
from octavo.frontend.accounting import account
from octavo.frontend.check_trace import TraceCheck, check_trace
from octavo.frontend.kv_scales import load_kv_scales
from octavo.frontend.model_files import write_model_files
from octavo.frontend.read_codes import holds_codes, read_codes
from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.source import open_weights
from octavo.frontend.trace import BoundWeights, Imported, import_model
from octavo.ir.graph import Graph
from octavo.ir.manifest import BLOCK_GROUPS, Manifest, num_groups
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import DTYPE_NAMES
from octavo.ir.weight_cache import WeightSource
from octavo.job import Job
from octavo.memory import release_memory
from octavo.passes.pipeline import Stage, run_pipeline
from octavo.passes.quant_recipe import Quantization, Recipe
from octavo.proof import check_program, measured_loss, with_rounded_cache, write_golden
from octavo.quantize import (
    RECIPE_FILE,
    count_schemes,
    find_schemes,
    recipe_text,
    unquantized_notices,
)
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import write_binaries
from octavo.runtime.record_program import record_program
from octavo.source_tokenizer import source_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """The graph as the passes left it, and its stages."""

    graph: Graph
    stages: list[Stage]


def build_artifact(job: Job) -> tuple[Manifest, AutoRecipe | None]:
    """Write the artifact; returns its manifest, and the recipe that a budget led to."""
    imported = _traced(job)
    weights = _weights(job, imported)
    # What the passes and the text refuse is refused here, before a model runs for minutes.
    asked = job.quantization
    kv_samples = _kv_samples(job, imported)
    # Without weights nobody knows offsets of keys: they are zeros.
    are_zeros = job.kv.calibration is not None and not job.with_weights
    has_offsets = kv_samples is not None or are_zeros
    step = _rewritten(job, imported, asked, has_offsets)
    _tell_unquantized(job, step)
    samples = _samples(job, imported)
    check = _compared(job, imported, weights)
    codes = job.writer.directory / "codes"  # as long as weights are written
    planned = Planned(asked, weights)
    if samples is not None:
        planned = _calibrated(job, imported, weights, samples, codes)
        step = _rewritten(job, imported, planned.quantization, has_offsets)
    offsets = {} if kv_samples is None else _key_offsets(job, imported, weights, kv_samples)
    imported.buffers.update(offset_buffers(step.graph, offsets))
    job.writer.write_stages(step.stages)
    if planned.quantization.recipe is not None:
        job.writer.write_text(RECIPE_FILE, recipe_text(planned.quantization.recipe))
    generated = _generated(job, step.graph, planned.weights)
    shutil.rmtree(codes, ignore_errors=True)
    if check is not None:
        if not generated.layouts:
            check = with_rounded_cache(job, step.graph, weights, check)
        write_golden(job, step.graph, check, generated)
    fields = _fields(job, imported, step.graph, generated, planned.quantization.recipe)
    _compile_kernels(job, fields)
    manifest = job.writer.finish(**fields)
    with job.phases("check the program"):
        check_program(job)
    loss = measured_loss(job, generated)
    if loss is not None:
        manifest = job.writer.add_text(manifest, LOSS_FILE, loss)
    return manifest, planned.auto


def _traced(job: Job) -> Imported:
    with job.phases("trace"):
        imported = import_model(job.source.config, job.dtype)
        for notice in imported.notices:
            logger.warning("%s", notice)
    return imported


def _weights(job: Job, imported: Imported) -> BoundWeights:
    """The graph's weights, each of the checkpoint's tensors used or explained."""
    with job.phases("account for the weights"):
        checkpoint = open_weights(job.source, imported.model)
        account(imported.model, checkpoint)
        if not job.dequantize:
            for notice in checkpoint.notices():
                logger.warning("%s", notice)
            imported.buffers.update(read_codes(imported.graph, checkpoint))
        elif not holds_codes(checkpoint):
            logger.warning(
                "--dequantize has no effect: %s holds nothing quantised", job.source.name
            )
        return BoundWeights(checkpoint, imported.buffers, checkpoint)


def _samples(job: Job, imported: Imported) -> list[list[int]] | None:
    """The text that calibrates, as token ids; the budget must have room for what it is spent on."""
    if job.tokenizer is None:
        return None
    request = job.calibration
    if request.budget_gb is not None:
        check_budget(request.budget_gb, imported, _schemes(job), job.targets.main.kind)
    return read_samples(request, job.tokenizer, imported.max_position)


def _kv_samples(job: Job, imported: Imported) -> list[list[int]] | None:
    """The text that offsets of keys are found with, as token ids; None for no offsets."""
    if job.kv.calibration is None or not job.with_weights:
        return None
    tokenizer = job.tokenizer or source_tokenizer(job.source)
    return read_kv_samples(job.kv.calibration, tokenizer, imported.max_position)


def _key_offsets(
    job: Job, imported: Imported, weights: BoundWeights, samples: list[list[int]]
) -> dict[int, Tensor]:
    """What is taken off the keys of each slot, by runs of the graph on the text."""
    with job.phases("calibrate the KV cache"):
        graph = graph_before_quantization(
            imported.graph, max_position=imported.max_position, target=job.targets.main.kind
        )
        found = find_key_offsets(graph, weights, samples)
        release_memory()
    return found


def _compared(job: Job, imported: Imported, weights: BoundWeights) -> TraceCheck | None:
    """Hugging Face's own run with the weights, which the graph must match."""
    if not job.with_weights:
        return None
    with job.phases("compare with Hugging Face"):
        check = check_trace(imported, job.source.config, job.dtype, weights.source)
        release_memory()
    return check


def _calibrated(
    job: Job, imported: Imported, weights: BoundWeights, samples: list[list[int]], codes: Path
) -> Planned:
    """What is quantised and how, by runs of the graph on the text."""
    with job.phases("calibrate") as tell:
        codes.mkdir()
        planned = plan_quantization(
            imported,
            weights,
            job.quantization,
            job.calibration,
            target=job.targets.main.kind,
            sequences=samples,
            folder=codes,
            schemes=_schemes(job),
            progress=tell,
        )
        release_memory()
    return planned


def _schemes(job: Job) -> list[QuantScheme]:
    """What a budget is spent on."""
    return find_schemes(AUTO_SCHEMES, DTYPE_NAMES[job.dtype], job.targets.every)


def _rewritten(
    job: Job, imported: Imported, quantization: Quantization, has_kv_offsets: bool
) -> _Step:
    """Run the passes on a copy of the graph: the comparison needs the graph as it was imported."""
    graph = parse_graph(print_graph(imported.graph))
    with job.phases("rewrite"):
        stages = run_pipeline(
            graph,
            max_position=imported.max_position,
            target=job.targets.main.kind,
            quantization=quantization,
            kv_scheme=job.kv.scheme,
            has_kv_scales=job.kv.has_head_scales,
            has_kv_offsets=has_kv_offsets,
        )
        _refuse_unpaged(graph, stages)
        if job.kv.scales is not None:
            imported.buffers.update(load_kv_scales(graph, job.source, job.kv.scales))
    return _Step(graph, stages)


def _tell_unquantized(job: Job, step: _Step) -> None:
    if job.recipe is not None:
        for notice in unquantized_notices(job.recipe, step.stages):
            logger.warning("%s", notice)


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


def _fields(
    job: Job, imported: Imported, graph: Graph, generated: Generated, recipe: Recipe | None
) -> dict[str, Any]:
    """What the manifest says besides its files."""
    return {
        "architecture": type(imported.model).__name__,
        "model_type": job.source.config.model_type,
        "target": job.targets.main.name,
        "dtype": str(job.dtype).removeprefix("torch."),
        "quantization": recipe.name if recipe else None,
        "quant_schemes": count_schemes(graph),
        "vocab_size": graph.outputs[0].shape[-1],
        "max_position": imported.max_position,
        "kv_slots": generated.kv_slots,
        "required_features": (BLOCK_GROUPS,) if num_groups(generated.kv_slots) > 1 else (),
        "kv_scheme": None if job.kv.scheme is None else str(job.kv.scheme),
        "num_key_offsets": len(offset_buffers(graph, {})),
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
