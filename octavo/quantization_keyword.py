"""LLM's keyword ``quantization`` where it only states what is so: nothing is left to ask for.

vLLM's users name with it how a checkpoint comes quantised, whose codes are kept without being
asked. And of an artifact it may say, in whatever words, what its linears were quantised by.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.ir.types import DTYPE_NAMES
from octavo.runtime.artifact import Artifact, read_json_object, read_manifest
from octavo.runtime.errors import InvalidRequest

GGUF = "gguf"
# vLLM's names, some of them with the kernels that it uses, and what config.json says.
METHODS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "gguf": GGUF,
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "mxfp4": "mxfp4",
}
# Those that are schemes besides: a whole checkpoint is quantised so.
_SCHEMES = ("fp8", "mxfp4")
# What quantises a whole checkpoint much as the method would have.
_INSTEAD = {"bitsandbytes": "nf4", "compressed-tensors": "int8-w8a8"}


def settle_quantization(model: str | Path, asked: str, revision: str | None) -> str | None:
    """What is left to ask for: None where ``asked`` states how a model comes quantised.

    Raises InvalidRequest, with what to write, where it states what is not so.
    """
    path = Path(model).expanduser()
    if not (path / "manifest.json").is_file():
        is_stated = asked in METHODS and _states(
            asked, str(model), _method_of_source(str(model), path, revision)
        )
        return None if is_stated else asked
    artifact = Artifact(path, read_manifest(path))  # whose files are checked when it is loaded
    if asked in METHODS and _states(asked, str(model), _method_of_artifact(artifact)):
        return None
    return _settle_recipe(artifact, asked)


def _states(asked: str, model: str, method: str | None) -> bool:
    """Whether that is how the model comes. Raises InvalidRequest where it can mean nothing else."""
    if METHODS[asked] == method:
        return True
    if asked in _SCHEMES:
        return False
    raise InvalidRequest(_refusal(model, asked, method))


def _settle_recipe(artifact: Artifact, asked: str) -> str | None:
    """Compare what recipes say, not what their files are called."""
    # Here and not above: an artifact loads without the seconds that the compiler takes.
    from octavo.calibrate.plan import AUTO
    from octavo.quantize import RECIPE_FILE, find_recipe, recipe_difference

    compiled, path = artifact.manifest.quantization, artifact.file(RECIPE_FILE)
    if compiled is None or path is None or asked == compiled == AUTO:
        return asked
    head = compiled.partition(", head ")[2]
    dtype = DTYPE_NAMES[artifact.dtype]
    made = replace(find_recipe(path, dtype=dtype), name=f"that of {artifact.root}")
    difference = recipe_difference(made, find_recipe(asked, dtype=dtype, head=head or None))
    if difference is None:
        return None
    raise InvalidRequest(
        f"{artifact.root} was compiled with quantization {compiled}, not {asked}: of the recipes"
        f" {difference}; leave quantization out or compile the model again with --quant {asked}"
    )


def _refusal(model: str, asked: str, stated: str | None) -> str:
    claim = f"quantization={asked!r} says that a checkpoint comes quantised so"
    if stated is not None:
        return f"{model} comes quantised by {stated}, and {claim}; leave quantization out"
    if asked == GGUF:
        return f"{model} is no GGUF, and {claim}; give the .gguf file, or leave quantization out"
    instead = _INSTEAD.get(asked, "int4")
    return (
        f"{model} keeps no codes of a quantised checkpoint, and {claim}; leave quantization out,"
        f" or write quantization={instead!r} for a whole checkpoint to be quantised"
    )


def _method_of_artifact(artifact: Artifact) -> str | None:
    """How the checkpoint came whose codes the artifact has; None if it has none."""
    manifest = artifact.manifest
    if manifest.quantization is not None or not manifest.quant_schemes:
        return None
    # A GGUF has no config.json; the one that is made of it names no method.
    return _method(artifact.model_json("config.json")) or GGUF


def _method_of_source(model: str, path: Path, revision: str | None) -> str | None:
    if path.suffix == ".gguf":
        return GGUF
    # Here and not above: an artifact loads without the seconds that the compiler takes.
    from octavo.frontend.hub import fetch_snapshot, is_model_id

    if not path.exists() and is_model_id(model):
        path = fetch_snapshot(model, revision, with_weights=False)
    config = path / "config.json"
    return _method(read_json_object(config)) if config.is_file() else None


def _method(config: dict[str, object]) -> str | None:
    stated = config.get("quantization_config", config.get("compression_config"))
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    return method if isinstance(method, str) else None
