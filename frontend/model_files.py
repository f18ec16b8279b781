"""What goes into an artifact's model/: config, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from octavo.frontend.gguf_header import GgufHeader, read_gguf_header
from octavo.frontend.gguf_tokenizer import gguf_generation_config, gguf_tokenizer
from octavo.ir.errors import OctavoError

if TYPE_CHECKING:
    from octavo.frontend.source import ModelSource

_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Files that a tokenizer.json can be made of.
_SLOW_TOKENIZER = ("vocab.json", "tokenizer.model", "vocab.txt")


def list_model_files(directory: Path) -> list[Path]:
    """The files of a checkpoint directory that an artifact keeps."""
    return [directory / name for name in _COPIED if (directory / name).is_file()]


def check_tokenizer(directory: Path) -> None:
    """Raise OctavoError when the directory has a tokenizer.json that cannot be loaded."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())[:200]
        raise OctavoError(
            f"{path} cannot be loaded: {reason}; copy or download the file again"
        ) from error


def write_model_files(source: ModelSource, destination: Path) -> None:
    """Fill `destination` (made if need be) so that the runtime needs only the `tokenizers` package.

    Byte copies where there are files. A GGUF's are made from its metadata; a missing
    tokenizer.json is made from the slow tokenizer's files. What is made is the same bytes each
    time. Raises OctavoError when a tokenizer cannot be converted. A model without any tokenizer
    gets none.
    """
    destination.mkdir(parents=True, exist_ok=True)
    if source.kind == "gguf":
        _write_gguf_files(source, read_gguf_header(source.path), destination)
        return
    for path in source.model_files:
        # A bare config file may have any name; in the artifact it is config.json.
        name = "config.json" if path == source.path else path.name
        shutil.copyfile(path, destination / name)
    directory = source.path
    has_slow = any((directory / name).is_file() for name in _SLOW_TOKENIZER)
    if has_slow and not (directory / "tokenizer.json").is_file():
        _convert_slow_tokenizer(directory, destination)


def _write_gguf_files(source: ModelSource, header: GgufHeader, destination: Path) -> None:
    config = source.config.to_dict()
    # The file's own name and the version of transformers would make two equal artifacts differ.
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
    config["architectures"] = [model_class.__name__]
    _write_json(destination / "config.json", config)
    _write_json(destination / "generation_config.json", gguf_generation_config(header))
    tokenizer = gguf_tokenizer(header)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, destination)


def _convert_slow_tokenizer(directory: Path, destination: Path) -> None:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True
        )
    except Exception as error:  # each tokenizer class raises its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OctavoError(
            f"{directory}: its tokenizer cannot be converted to tokenizer.json: {reason}"
        ) from error
    if not tokenizer.is_fast:
        raise OctavoError(
            f"{directory}: {type(tokenizer).__name__} has no fast form; add a tokenizer.json"
        )
    _save_tokenizer(tokenizer, destination)


def _save_tokenizer(tokenizer: Any, destination: Path) -> None:
    """Write tokenizer.json and, where they are not there yet, the files that go with it."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).iterdir()):
            target = destination / path.name
            if target.exists():
                continue
            if path.name == "tokenizer_config.json":
                _write_json(target, json.loads(path.read_text("utf-8")))
            else:
                shutil.copyfile(path, target)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
