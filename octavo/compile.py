"""The compiler, front to back: a model in, an artifact directory out."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import octavo
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.generate import generate
from octavo.codegen.target import Target, resolve_target
from octavo.frontend.accounting import account
from octavo.frontend.check_trace import TraceCheck, check_trace
from octavo.frontend.config import choose_dtype
from octavo.frontend.model_files import write_model_files
from octavo.frontend.refused import RefusedArchitecture, is_out_of_memory
from octavo.frontend.source import ModelSource, open_weights, resolve
from octavo.frontend.trace import BoundWeights, import_model
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.manifest import Manifest
from octavo.memory import release_memory
from octavo.passes.pipeline import Stage, run_pipeline
from octavo.phases import Phases
from octavo.runtime.artifact import Artifact
from octavo.runtime.self_check import check_golden

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


def compile_model(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    target: str = "auto",
    random_weights: int | None = None,
    revision: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> CompileReport:
    """Compile a model into an artifact directory.

    ``model`` is a model directory, a GGUF file, a hub id, or a config.json with ``random_weights``,
    a seed. ``dtype`` is auto, float32, bfloat16 or float16; ``target`` auto or cpu. An existing
    ``output`` is replaced only with ``force``, and only when the new artifact is complete.
    Of several threads one compiles at a time, the others wait. Raises OctavoError, one line; then,
    and when interrupted, ``output`` is as it was before and what was written beside it is removed.
    """
    start = time.perf_counter()
    phases = Phases(visible=progress)
    chosen = resolve_target(target)
    writing = ArtifactWriter(Path(output), force=force)
    with _COMPILING, _explained_memory(), phases.shown(), writing as writer:
        writer.begin()
        with phases("read the model"):
            source = resolve(model, revision=revision, random_weights=random_weights)
            torch_dtype = choose_dtype(dtype, source.config, chosen.name)
        manifest = _build(source, torch_dtype, chosen, writer, phases)
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


def _build(
    source: ModelSource, dtype: torch.dtype, target: Target, writer: ArtifactWriter, phases: Phases
) -> Manifest:
    with phases("trace"):
        imported = import_model(source.config, dtype)
        for notice in imported.notices:
            logger.warning("%s", notice)
    with phases("account for the weights"):
        checkpoint = open_weights(source, imported.model)
        account(imported.model, checkpoint)
        weights = BoundWeights(checkpoint, imported.buffers)
    with phases("compare with Hugging Face"):
        check = check_trace(imported, source.config, dtype, checkpoint)
        writer.write_text("tests/golden.json", _golden(check))
        release_memory()
    graph = imported.graph
    with phases("rewrite"):
        stages = run_pipeline(graph, max_position=imported.max_position)
        _refuse_unpaged(graph, stages)
        writer.write_stages(stages)
    with phases("write kernels and weights"):
        generated = generate(graph, target, writer.directory, weights)
        write_model_files(source, writer.directory / "model")
        release_memory()
    with phases("check the program"):
        manifest = writer.finish(
            architecture=type(imported.model).__name__,
            model_type=source.config.model_type,
            target=target.name,
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=graph.outputs[0].shape[-1],
            max_position=imported.max_position,
            kv_slots=generated.kv_slots,
            source=source.name,
            revision=source.revision,
            producer=_producer(),
        )
        check_golden(Artifact.open(writer.directory))
    return manifest


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


def _producer() -> dict[str, str]:
    packages = ("torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"octavo": octavo.__version__, **versions}
