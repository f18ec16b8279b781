"""The compiler, front to back: a model in, an artifact directory out."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octavo
from octavo.calibrate.auto import AutoRecipe
from octavo.calibrate.key_offsets import offset_buffers
from octavo.calibrate.plan import (
    AUTO,
    AUTO_SCHEMES,
    CalibrationRequest,
    Planned,
    plan_quantization,
)
from octavo.calibrate.plan_offsets import plan_key_offsets
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.cpu_rules import DEQUANTIZED_AT_LOAD
from octavo.codegen.generate import Generated, generate
from octavo.codegen.target import Target, Targets, cuda_target, resolve_targets
from octavo.codegen.weights import WrittenWeights
from octavo.evaluate.loss_file import LOSS_FILE, measure_loss
from octavo.frontend.accounting import account
from octavo.frontend.check_trace import TraceCheck, check_rounded, check_trace
from octavo.frontend.config import choose_dtype
from octavo.frontend.kv_scales import head_constants, load_kv_scales
from octavo.frontend.model_files import write_model_files
from octavo.frontend.read_codes import read_codes
from octavo.frontend.refused import RefusedArchitecture, is_out_of_memory
from octavo.frontend.source import ModelSource, open_weights, resolve
from octavo.frontend.trace import BoundWeights, Imported, import_model
from octavo.golden import golden_json, quantized_golden_json
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.manifest import BLOCK_GROUPS, Manifest, num_groups
from octavo.ir.types import DTYPE_NAMES
from octavo.kv_options import KVOptions, resolve_kv_options
from octavo.memory import release_memory
from octavo.passes.pipeline import Stage, run_pipeline
from octavo.passes.quant_recipe import Quantization, Recipe
from octavo.phases import Phases
from octavo.quantize import AS_IS, count_schemes, find_recipe, find_schemes, unquantized_notices
from octavo.runtime.artifact import Artifact
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import num_compile_workers, write_binaries
from octavo.runtime.record_program import record_program
from octavo.runtime.self_check import check_golden
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.tune import tune_artifact

logger = logging.getLogger(__name__)

LOSS_TOKENS = 1024

# While a model is traced, hooks stand in transformers' registries, which all threads share, and
# torch.export is not thread-safe either.
_COMPILING = threading.Lock()


@dataclass(frozen=True)
class CompileReport:
    """What a compile did: where the artifact is, what it is, and how long each phase took."""

    output: Path
    artifact_id: str
    total_bytes: int
    seconds: float
    stages: list[tuple[str, float]]


@dataclass(frozen=True)
class _Job:
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


def compile_model(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    target: str = "auto",
    quant: str | Path | None = None,
    quant_head: str | None = None,
    calibration: CalibrationRequest | None = None,
    loss_tokens: int = LOSS_TOKENS,
    dequantize: bool = False,
    random_weights: int | None = None,
    with_weights: bool = True,
    tune_seconds: float = 0.0,
    revision: str | None = None,
    force: bool = False,
    progress: bool = True,
    kv_cache_dtype: str = "auto",
    kv_scale_per: str | None = None,
    kv_scales: str | Path | None = None,
    kv_calibration: str | Path | None = None,
) -> CompileReport:
    """Compile a model into an artifact directory.

    ``model`` is a model directory, a GGUF file, a hub id, or a config.json with ``random_weights``,
    a seed. ``dtype`` is auto, float32, bfloat16 or float16; ``target`` auto, cpu, cuda (this
    machine's GPU) or ``cuda:sm_90`` and the like, several with commas. ``quant`` names a way to
    quantise the linears, or a .yaml file of patterns and ways (docs/quantization.md);
    ``quant_head`` one for the LM head, which is left as it is otherwise; ``calibration`` says with
    what text codes are chosen, and for ``quant="auto"`` within what budget. A quantised artifact is
    compared with the model on ``loss_tokens`` tokens of a text; 0 leaves it out. A quantised
    checkpoint keeps its codes, unless ``dequantize`` says to read it as numbers.
    ``kv_cache_dtype``, ``kv_scale_per``, ``kv_scales`` and ``kv_calibration`` say how the KV cache
    holds keys and values, see ``resolve_kv_options``. Without ``with_weights`` only the shapes of
    the checkpoint's weights are stored, for runs with ``load_format="dummy"``, and offsets of keys
    are zeros. On a machine with the GPU that is compiled for, kernels are tuned for up to
    ``tune_seconds``. An existing ``output`` is replaced only with ``force``, and only when the new
    artifact is complete. Of several threads one compiles at a time, the others wait. Raises
    OctavoError, one line; then, and when interrupted, ``output`` is as it was before and what was
    written beside it is removed.
    """
    start = time.perf_counter()
    phases = Phases(visible=progress)
    targets = resolve_targets(target)
    kv = resolve_kv_options(kv_cache_dtype, kv_scale_per, kv_scales, targets, kv_calibration)
    num_compile_workers()  # a setting that is wrong is refused before any work
    if not with_weights and random_weights is None:
        random_weights = 0  # none are drawn: a config alone is enough
    request = calibration or CalibrationRequest()
    request.check(
        None if quant is None else str(quant), quant_head=quant_head, with_weights=with_weights
    )
    writing = ArtifactWriter(Path(output), force=force)
    with _COMPILING, _explained_memory(), phases.shown(), writing as writer:
        writer.begin()
        with phases("read the model"):
            source = resolve(model, revision=revision, random_weights=random_weights)
            torch_dtype = choose_dtype(dtype, source.config, targets.main.name)
            recipe = _recipe(quant, quant_head, torch_dtype, targets)
        job = _Job(
            source,
            torch_dtype,
            targets,
            writer,
            phases,
            with_weights,
            recipe,
            request,
            loss_tokens,
            dequantize,
            kv,
        )
        manifest, auto = _build(job)
        if tune_seconds and targets.main.is_here:
            with phases("tune"):
                tune_artifact(writer.directory, seconds=tune_seconds)
        total = sum(entry.size for entry in manifest.files.values())
        seconds = time.perf_counter() - start
    if (
        auto is not None
    ):  # not before the artifact is in its place: a compile that fails leaves none
        recipe_path(Path(output)).write_text(auto.to_yaml(), "utf-8")
    return CompileReport(Path(output), manifest.artifact_id, total, seconds, phases.seconds)


def _recipe(
    quant: str | Path | None, head: str | None, dtype: torch.dtype, targets: Targets
) -> Recipe | None:
    """The recipe, which all the architectures that are compiled for must have kernels for."""
    if (quant is None or quant == AUTO) and head is None:
        return None
    recipe = None
    for target in _every(targets):
        recipe = find_recipe(quant or AS_IS, dtype=DTYPE_NAMES[dtype], head=head, target=target)
    return recipe


def _every(targets: Targets) -> list[Target]:
    """The oldest GPU first: what it cannot do is the reason to give."""
    return [cuda_target(arch) for arch in sorted(targets.archs)] or [targets.main]


@contextmanager
def _explained_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise OctavoError(
            f"not enough memory to compile: {reason or 'an allocation failed'}; check the sizes in"
            " config.json, or use a machine with more"
        ) from error


def _build(job: _Job) -> tuple[Manifest, AutoRecipe | None]:
    """Write the artifact; returns its manifest, and the recipe that a budget led to."""
    phases = job.phases
    with phases("trace"):
        imported = import_model(job.source.config, job.dtype)
        for notice in imported.notices:
            logger.warning("%s", notice)
    weights, check = _weights(job, imported)
    codes = job.writer.directory / "codes"  # as long as weights are written
    planned = _planned(job, imported, weights, codes)
    key_offsets = _key_offsets(job, imported, weights, codes)
    graph = imported.graph
    with phases("rewrite"):
        stages = run_pipeline(
            graph,
            max_position=imported.max_position,
            target=job.targets.main.kind,
            quantization=planned.quantization,
            kv_scheme=job.kv.scheme,
            has_kv_scales=job.kv.has_head_scales,
            has_kv_offsets=key_offsets is not None,
        )
        _refuse_unpaged(graph, stages)
        if job.recipe is not None:
            for notice in unquantized_notices(job.recipe, stages):
                logger.warning("%s", notice)
        job.writer.write_stages(stages)
        if job.kv.scales is not None:
            imported.buffers.update(load_kv_scales(graph, job.source, job.kv.scales))
        imported.buffers.update(offset_buffers(graph, key_offsets or {}))
    with phases("write kernels and weights"):
        generated = generate(
            graph,
            job.targets.main,
            job.writer.directory,
            planned.weights,
            without_checkpoint=not job.with_weights,
        )
        shutil.rmtree(codes, ignore_errors=True)
        write_model_files(job.source, job.writer.directory / "model")
        release_memory()
    _tell_dequantized(generated)
    if check is not None:
        if not generated.layouts:
            check = _with_rounded_cache(job, imported, weights, check)
        _write_golden(job, graph, check, generated)
    fields = _fields(job, imported, generated, planned.quantization.recipe)
    if job.targets.archs:
        with phases("compile kernels"):
            draft = job.writer.draft(**fields)
            directory = job.writer.directory
            launches = {
                arch: record_program(directory, draft, arch=arch) for arch in job.targets.archs
            }
            write_binaries(launches, directory / "kernels" / "bin", cache=BinaryCache())
    manifest = job.writer.finish(**fields)
    with phases("check the program"):
        _check(job, manifest)
    loss = _measured_loss(job) if generated.layouts else None
    if loss is not None:
        manifest = job.writer.add_text(manifest, LOSS_FILE, loss)
    return manifest, planned.auto


def _planned(job: _Job, imported: Imported, weights: BoundWeights, codes: Path) -> Planned:
    """What is quantised and how, by a calibration if one is asked for."""
    request = job.calibration
    target = job.targets.main
    found = Quantization(job.recipe, why_no_kernel=target.why_no_kernel, can_embed=target.can_embed)
    if not job.with_weights or (request.text is None and request.budget_gb is None):
        return Planned(found, weights)
    with job.phases("calibrate") as tell:
        planned = plan_quantization(
            imported,
            weights,
            found,
            request,
            target=target.kind,
            tokenizer=_tokenizer(job, codes),
            folder=codes,
            schemes=find_schemes(AUTO_SCHEMES, DTYPE_NAMES[job.dtype], _every(job.targets)),
            progress=tell,
        )
        release_memory()
    return planned


def _key_offsets(
    job: _Job, imported: Imported, weights: BoundWeights, folder: Path
) -> dict[int, Tensor] | None:
    """What is taken off the keys of each slot, None for nothing. Without weights nobody knows."""
    if job.kv.calibration is None:
        return None
    if not job.with_weights:
        return {}
    with job.phases("calibrate the KV cache"):
        found = plan_key_offsets(
            imported,
            weights,
            job.kv.calibration,
            target=job.targets.main.kind,
            tokenizer=_tokenizer(job, folder),
        )
        release_memory()
    return found


def _tokenizer(job: _Job, folder: Path) -> Tokenizer | None:
    """The model's tokenizer, read from a folder that takes its files; None if it has none."""
    write_model_files(job.source, folder)
    has_one = (folder / "tokenizer.json").is_file()
    return Tokenizer.from_directory(folder) if has_one else None


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
    job: _Job, imported: Imported, weights: BoundWeights, check: TraceCheck
) -> TraceCheck:
    """Hugging Face's answers with a KV cache of codes, if the program has one."""
    if job.kv.scheme is None:
        return check
    with job.phases("compare with Hugging Face"):
        heads = head_constants(imported.graph, imported.buffers)
        config, source = job.source.config, weights.source
        rows, bound = check_rounded(config, job.dtype, source, check.prompts, job.kv.scheme, heads)
        release_memory()
    return replace(check, rows=tuple(rows), bound=bound)


def _write_golden(job: _Job, graph: Graph, check: TraceCheck, generated: Generated) -> None:
    """What the program is held to: of a quantised model, its own graph."""
    if not generated.layouts:
        job.writer.write_text("tests/golden.json", golden_json(check))
        return
    with job.phases("interpret the quantised graph"):
        stored = WrittenWeights(job.writer.directory / "weights")
        text = quantized_golden_json(check, graph, stored, generated.layouts)
        job.writer.write_text("tests/golden.json", text)
        release_memory()


def _weights(job: _Job, imported: Imported) -> tuple[BoundWeights, TraceCheck | None]:
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


def _fields(
    job: _Job, imported: Imported, generated: Generated, recipe: Recipe | None
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
        "num_key_offsets": len(offset_buffers(imported.graph, {})),
        "source": job.source.name,
        "revision": job.source.revision,
        "producer": _producer(uses_triton=job.targets.main.kind == "cuda"),
    }


def _check(job: _Job, manifest: Manifest) -> None:
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


def _measured_loss(job: _Job) -> str | None:
    """What quantising costs, as tests/loss.json says it, where there is a device and a text."""
    can_run = job.targets.main.kind == "cpu" or torch.cuda.is_available()
    if not (job.with_weights and can_run and job.loss_tokens) or job.source.kind == "random":
        return None
    with job.phases("measure the loss"):
        return measure_loss(job.writer.directory, job.source, job.loss_tokens)


def recipe_path(output: Path) -> Path:
    """Where the recipe that a budget led to is written: beside the artifact."""
    return output.with_name(f"{output.name}.recipe.yaml")


def _refuse_unpaged(graph: Graph, stages: list[Stage]) -> None:
    """A model whose attention could not be paged has no step. Says what the pass said."""
    if not graph.find("attention"):
        return
    [stage] = [stage for stage in stages if stage.name == "page-attention"]
    raise RefusedArchitecture(f"its attention cannot use a paged cache: {stage.summary}")


def _producer(uses_triton: bool) -> dict[str, str]:
    packages = ("torch", "transformers", *(("triton",) if uses_triton else ()))
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"octavo": octavo.__version__, **versions}
