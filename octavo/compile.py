"""The compiler, front to back: a model in, an artifact directory out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.build import build_artifact
from octavo.calibrate.plan import AUTO, CalibrationRequest
from octavo.calibrate.recipe_file import write_recipe
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.target import Targets, resolve_targets
from octavo.frontend.config import choose_dtype
from octavo.frontend.refused import is_out_of_memory
from octavo.frontend.source import ModelSource, resolve
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import Manifest
from octavo.ir.types import DTYPE_NAMES
from octavo.job import Job
from octavo.kv_options import resolve_kv_options
from octavo.passes.quant_recipe import Recipe
from octavo.phases import Phases
from octavo.quantize import NO_SCHEME, find_recipe
from octavo.runtime.cross_compile import num_compile_workers
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.tune import tune_artifact
from octavo.source_tokenizer import source_tokenizer

# While a model is traced, hooks stand in transformers' registries, which all threads share, and
# torch.export is not thread-safe either.
_COMPILING = threading.Lock()


@dataclass(frozen=True)
class CompileReport:
    """What a compile did: where the artifact is, what it is, and how long each phase took.

    ``recipe`` is the file that ``quant="auto"`` wrote beside the artifact.
    """

    output: Path
    artifact_id: str
    total_bytes: int
    seconds: float
    stages: list[tuple[str, float]]
    recipe: Path | None = None


def compile_model(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    target: str = "auto",
    quant: str | Path | None = None,
    quant_head: str | None = None,
    calibration: CalibrationRequest | None = None,
    loss_tokens: int | None = None,
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
    compared with the model on ``loss_tokens`` tokens of a text, 1024 for None; 0 leaves it out.
    A quantised checkpoint keeps its codes, unless ``dequantize`` says to read it as numbers.
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
    phases, targets = Phases(visible=progress), resolve_targets(target)
    kv = resolve_kv_options(kv_cache_dtype, kv_scale_per, kv_scales, targets, kv_calibration)
    num_compile_workers()  # a setting that is wrong is refused before any work
    if not with_weights and random_weights is None:
        random_weights = 0  # none are drawn: a config alone is enough
    request = calibration or CalibrationRequest()
    request.check(quant, quant_head=quant_head, with_weights=with_weights)
    writing = ArtifactWriter(Path(output), force=force)
    with _COMPILING, _explained_memory(), phases.shown(), writing as writer:
        writer.begin()
        with phases("read the model"):
            source = resolve(model, revision=revision, random_weights=random_weights)
            torch_dtype = choose_dtype(dtype, source.config, targets.main.name)
            recipe = _recipe(quant, quant_head, torch_dtype, targets)
            _check_codes_to_choose(request, recipe)
            tokenizer = _tokenizer(source) if request.runs_text else None
        job = Job(
            source=source,
            dtype=torch_dtype,
            targets=targets,
            writer=writer,
            phases=phases,
            with_weights=with_weights,
            recipe=recipe,
            calibration=request,
            tokenizer=tokenizer,
            loss_tokens=loss_tokens,
            dequantize=dequantize,
            kv=kv,
        )
        manifest, auto = build_artifact(job)
        if tune_seconds and targets.main.is_here:
            with phases("tune"):
                tune_artifact(writer.directory, seconds=tune_seconds)
    # Not before the artifact is in its place: a compile that fails leaves none.
    file = None if auto is None else write_recipe(Path(output), auto.to_yaml())
    total, seconds = _total_bytes(manifest), time.perf_counter() - start
    return CompileReport(Path(output), manifest.artifact_id, total, seconds, phases.seconds, file)


def _total_bytes(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.files.values())


def _recipe(
    quant: str | Path | None, head: str | None, dtype: torch.dtype, targets: Targets
) -> Recipe | None:
    """The recipe, which all the architectures that are compiled for must have kernels for."""
    if (quant is None or quant == AUTO) and head is None:
        return None
    recipe = None
    for target in targets.every:
        recipe = find_recipe(quant or NO_SCHEME, dtype=DTYPE_NAMES[dtype], head=head, target=target)
    return recipe


def _check_codes_to_choose(request: CalibrationRequest, recipe: Recipe | None) -> None:
    if request.text is None or recipe is None or any(scheme for _, scheme in recipe.rules):
        return
    raise OctavoError(
        f"--calibration chooses codes, and {recipe.name} quantises nothing: leave it out, or name a"
        " scheme with --quant"
    )


def _tokenizer(source: ModelSource) -> Tokenizer:
    tokenizer = source_tokenizer(source)
    if tokenizer is None:
        raise OctavoError(
            f"{source.name} has no tokenizer, so no text can calibrate it: add its tokenizer.json,"
            " or round to nearest (--quant without --calibration and --budget-gb)"
        )
    return tokenizer


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
