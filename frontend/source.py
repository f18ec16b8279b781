"""What the user gave, resolved: a directory, a GGUF file, a model of the hub, or only a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers.conversion_mapping import get_model_conversion_mapping

from octavo.frontend.checkpoint import open_checkpoint
from octavo.frontend.config import quantization_of, read_config
from octavo.frontend.gguf import GgufWeights
from octavo.frontend.gguf_config import gguf_config
from octavo.frontend.gguf_header import read_gguf_header
from octavo.frontend.hub import fetch_snapshot, is_model_id
from octavo.frontend.model_files import check_tokenizer, list_model_files
from octavo.frontend.naming import NamedWeights
from octavo.frontend.quantized.methods import open_quantized
from octavo.frontend.random_weights import RandomWeights
from octavo.frontend.refused import NoWeights
from octavo.frontend.weights import TensorStore, TiedWeights, WeightSource, tied_names
from octavo.ir.errors import OctavoError


@dataclass(frozen=True)
class ModelSource:
    """A model that can be compiled. `config` is the transformers config.

    `path` is the checkpoint's directory, the .gguf file, or the bare config file; `name` is what
    to call it (a hub id, or the last part of the path, never a whole path); `revision` the hub's
    commit. `model_files` are the files that go into the artifact as they are; a GGUF has none, its
    are made. `quantization` is the quantization_config of a quantised checkpoint.
    """

    kind: Literal["safetensors", "gguf", "random"]
    name: str
    path: Path
    config: Any
    revision: str | None = None
    seed: int | None = None
    model_files: tuple[Path, ...] = ()
    quantization: Mapping[str, Any] | None = None


def resolve(
    model: str | Path, *, revision: str | None = None, random_weights: int | None = None
) -> ModelSource:
    """Find the model, read its config and check the headers of its weights; loads no weights.

    `model` is a directory with config.json and safetensors, a .gguf file, a hub id, or a
    config.json (or a directory with only that) together with `random_weights`, a seed. `revision`
    is of a hub id. Raises OctavoError.
    """
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise OctavoError(f"{model} is a path here; --revision applies to models of the hub")
    if path.is_file():
        return _from_file(path, random_weights)
    if path.is_dir():
        return _from_directory(path, path.resolve().name, None, random_weights)
    if not is_model_id(str(model)):
        raise OctavoError(
            f"{model} does not exist; expected a model directory, a .gguf file, a config.json or"
            " a hub id such as org/name"
        )
    directory = fetch_snapshot(str(model), revision, with_weights=random_weights is None)
    return _from_directory(directory, str(model), directory.name, random_weights)


def open_weights(source: ModelSource, model: Any) -> TiedWeights:
    """The weights by the names of `model`, which is on the meta device; see accounting.account.

    What the checkpoint holds quantised can be had so, too: it is a QuantizedSource. Of a tied pair
    either name can be loaded. Raises OctavoError when names clash.
    """
    return TiedWeights(_open(source, model), tied_names(model))


def _open(source: ModelSource, model: Any) -> WeightSource:
    if source.seed is not None:
        return RandomWeights(model, source.config, source.seed)
    if source.kind == "gguf":
        return GgufWeights(read_gguf_header(source.path), model)
    store = _open_store(source.path, source.quantization)
    return NamedWeights(store, model, get_model_conversion_mapping(model))


def _open_store(directory: Path, quantization: Mapping[str, Any] | None) -> TensorStore:
    stored = open_checkpoint(directory)
    return stored if quantization is None else open_quantized(stored, quantization)


def _from_file(path: Path, seed: int | None) -> ModelSource:
    if path.suffix == ".json":
        if seed is None:
            raise NoWeights(f"{path} holds no weights")
        _refuse_random_codes(path, quantization_of(path))
        return ModelSource("random", path.stem, path, read_config(path), None, seed, (path,))
    if path.suffix == ".gguf":
        if seed is not None:
            raise OctavoError(f"{path} has its own weights; leave out --random-weights")
        return ModelSource("gguf", path.stem, path, gguf_config(read_gguf_header(path)))
    if path.suffix == ".safetensors":
        raise OctavoError(f"{path} has no config beside it in itself; give its directory")
    raise OctavoError(f"{path} is not a model; expected a directory, a .gguf file or a config.json")


def _refuse_random_codes(path: Path, quantization: Mapping[str, Any] | None) -> None:
    if quantization is not None:
        raise OctavoError(
            f"{path} says quant_method {quantization['quant_method']}, but random weights are drawn"
            " in float; take quantization_config out of it, and choose a scheme with --quant"
        )


def _from_directory(
    directory: Path, name: str, revision: str | None, seed: int | None
) -> ModelSource:
    if (directory / "manifest.json").is_file() and (directory / "program.py").is_file():
        raise OctavoError(
            f"{directory} is an artifact already; run it with 'octavo chat' or 'octavo generate'"
        )
    if not (directory / "config.json").is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        hint = f"give the file itself: {ggufs[0]}" if ggufs else "is it a model directory?"
        raise OctavoError(f"{directory} has no config.json; {hint}")
    config = read_config(directory / "config.json")
    files = tuple(list_model_files(directory))
    check_tokenizer(directory)
    quantization = quantization_of(directory / "config.json")
    if seed is not None:
        _refuse_random_codes(directory / "config.json", quantization)
        return ModelSource("random", name, directory, config, revision, seed, files)
    # A cut or missing shard, or a missing scale, is told now, not after the model is traced.
    _open_store(directory, quantization)
    return ModelSource("safetensors", name, directory, config, revision, None, files, quantization)
