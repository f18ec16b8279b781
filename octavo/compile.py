"""The compiler, front to back: a model in, an artifact directory out."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.generate import Generated, generate
from octavo.codegen.target import Targets, resolve_targets
from octavo.frontend.accounting import account
from octavo.frontend.check_trace import TraceCheck, check_rounded, check_trace
from octavo.frontend.config import choose_dtype
from octavo.frontend.kv_scales import head_scales, load_kv_scales
from octavo.frontend.model_files import write_model_files
from octavo.frontend.refused import RefusedArchitecture, is_out_of_memory
from octavo.frontend.rounded_cache import HeadScales
from octavo.frontend.source import ModelSource, open_weights, resolve
from octavo.frontend.trace import BoundWeights, Imported, import_model
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.manifest import Manifest
from octavo.kv_options import KVOptions, resolve_kv_options
from octavo.memory import release_memory
from octavo.passes.pipeline import Stage, run_pipeline
from octavo.phases import Phases
from octavo.runtime.artifact import Artifact
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import num_compile_workers, write_binaries
from octavo.runtime.record_program import record_program
from octavo.runtime.self_check import check_golden
from octavo.runtime.tune import tune_artifact

logger = logging.getLogger(__name__)

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
    kv: KVOptions


def compile_model(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    target: str = "auto",
    random_weights: int | None = None,
    with_weights: bool = True,
    tune_seconds: float = 0.0,
    revision: str | None = None,
    force: bool = False,
    progress: bool = True,
    kv_cache_dtype: str = "auto",
    kv_scale_per: str | None = None,
    kv_scales: str | Path | None = None,
) -> CompileReport:
    """Compile a model into an artifact directory.

    ``model`` is a model directory, a GGUF file, a hub id, or a config.json with ``random_weights``,
    a seed. ``dtype`` is auto, float32, bfloat16 or float16; ``target`` auto, cpu, cuda (this
    machine's GPU) or ``cuda:sm_90`` and the like, several with commas. Without ``with_weights``
    only the shapes of the checkpoint's weights are stored, for runs with ``load_format="dummy"``.
    On a machine with the GPU that is compiled for, kernels are tuned for up to ``tune_seconds``.
    ``kv_cache_dtype``, ``kv_scale_per`` and ``kv_scales`` say how the KV cache holds keys and
    values, see ``resolve_kv_options``. An existing ``output`` is replaced only with ``force``, and
    only when the new artifact is complete. Of several threads one compiles at a time, the others
    wait. Raises OctavoError, one line; then, and when interrupted, ``output`` is as it was before
    and what was written beside it is removed.
    """
    start = time.perf_counter()
    phases = Phases(visible=progress)
    targets = resolve_targets(target)
    kv = resolve_kv_options(kv_cache_dtype, kv_scale_per, kv_scales, targets)
    num_compile_workers()  # a setting that is wrong is refused before any work
    if not with_weights and random_weights is None:
        random_weights = 0  # none are drawn: a config alone is enough
    writing = ArtifactWriter(Path(output), force=force)
    with _COMPILING, _explained_memory(), phases.shown(), writing as writer:
        writer.begin()
        with phases("read the model"):
            source = resolve(model, revision=revision, random_weights=random_weights)
            torch_dtype = choose_dtype(dtype, source.config, targets.main.name)
        manifest = _build(_Job(source, torch_dtype, targets, writer, phases, with_weights, kv))
        if tune_seconds and targets.main.is_here:
            with phases("tune"):
                tune_artifact(writer.directory, seconds=tune_seconds)
        total = sum(entry.size for entry in manifest.files.values())
        seconds = time.perf_counter() - start
    return CompileReport(Path(output), manifest.artifact_id, total, seconds, phases.seconds)


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


def _build(job: _Job) -> Manifest:
    phases = job.phases
    with phases("trace"):
        imported = import_model(job.source.config, job.dtype)
        for notice in imported.notices:
            logger.warning("%s", notice)
    weights, check = _weights(job, imported)
    graph = imported.graph
    with phases("rewrite"):
        stages = run_pipeline(
            graph,
            max_position=imported.max_position,
            target=job.targets.main.kind,
            kv_scheme=job.kv.scheme,
            has_kv_scales=job.kv.has_head_scales,
        )
        _refuse_unpaged(graph, stages)
        job.writer.write_stages(stages)
        if job.kv.scales is not None:
            imported.buffers.update(load_kv_scales(graph, job.source, job.kv.scales))
    if check is not None:
        _write_golden(job, weights, check, head_scales(graph, imported.buffers))
    with phases("write kernels and weights"):
        generated = generate(
            graph,
            job.targets.main,
            job.writer.directory,
            weights,
            without_checkpoint=not job.with_weights,
        )
        write_model_files(job.source, job.writer.directory / "model")
        release_memory()
    fields = _fields(job, imported, generated)
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
    return manifest


def _weights(job: _Job, imported: Imported) -> tuple[BoundWeights, TraceCheck | None]:
    """The graph's weights, after Hugging Face's own run with them, which the graph must match."""
    with job.phases("account for the weights"):
        checkpoint = open_weights(job.source, imported.model)
        account(imported.model, checkpoint)
        weights = BoundWeights(checkpoint, imported.buffers)
    if not job.with_weights:
        return weights, None
    with job.phases("compare with Hugging Face"):
        check = check_trace(imported, job.source.config, job.dtype, checkpoint)
        release_memory()
    return weights, check


def _write_golden(job: _Job, weights: BoundWeights, check: TraceCheck, scales: HeadScales) -> None:
    """Hugging Face's answers for the artifact; with a KV cache of codes if the program has one."""
    if job.kv.scheme is not None:
        with job.phases("compare with Hugging Face"):
            config, source = job.source.config, weights.source
            rows, bound = check_rounded(
                config, job.dtype, source, check.prompts, job.kv.scheme, scales
            )
            check = replace(check, rows=tuple(rows), bound=bound)
            release_memory()
    job.writer.write_text("tests/golden.json", _golden(check))


def _fields(job: _Job, imported: Imported, generated: Generated) -> dict[str, Any]:
    """What the manifest says besides its files."""
    return {
        "architecture": type(imported.model).__name__,
        "model_type": job.source.config.model_type,
        "target": job.targets.main.name,
        "dtype": str(job.dtype).removeprefix("torch."),
        "vocab_size": imported.graph.outputs[0].shape[-1],
        "max_position": imported.max_position,
        "kv_slots": generated.kv_slots,
        "kv_scheme": None if job.kv.scheme is None else str(job.kv.scheme),
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


def _golden(check: TraceCheck) -> str:
    """The text of tests/golden.json: what Hugging Face said, and how near the program has to be."""
    cases = [
        {
            "ids": row.ids,
            "first_position": row.first_position,
            "top_ids": row.top_ids,
            "top_logprobs": row.top_logprobs,
        }
        for row in check.rows
    ]
    # Logits that are each off by d give log-probabilities that are off by up to 2 d.
    return json.dumps({"tolerance": 2 * check.bound.largest, "cases": cases}, indent=1) + "\n"


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
