"""LLM's keyword ``quantization`` where it only states what is so.

vLLM's users name with it how a checkpoint comes quantised. Such a checkpoint keeps its codes
without being asked, so that there is nothing left to ask for.
"""

from __future__ import annotations

from pathlib import Path

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
    method = METHODS.get(asked)
    if method is None:
        return asked
    path = Path(model).expanduser()
    if (path / "manifest.json").is_file():
        # Its files are checked when it is loaded, once.
        stated = _method_of_artifact(Artifact(path, read_manifest(path)))
    else:
        stated = _method_of_source(str(model), path, revision)
    if stated == method:
        return None
    if asked in _SCHEMES:
        return asked
    raise InvalidRequest(_refusal(str(model), asked, method, stated))


def _refusal(model: str, asked: str, method: str, stated: str | None) -> str:
    claim = f"quantization={asked!r} says that a checkpoint comes quantised so"
    if stated is not None:
        return f"{model} comes quantised by {stated}, and {claim}; leave quantization out"
    if method == GGUF:
        return f"{model} is no GGUF, and {claim}; give the .gguf file, or leave quantization out"
    instead = _INSTEAD.get(method, "int4")
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
