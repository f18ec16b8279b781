"""Reading config.json, refusing what cannot be compiled, and choosing the dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from octavo.frontend.quantized.methods import read_quantization
from octavo.frontend.quiet import quiet_transformers
from octavo.ir.errors import OctavoError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def read_config(path: Path) -> Any:
    """The transformers config that a config.json describes.

    Raises OctavoError, naming the file, for what is not JSON, has no or an unknown `model_type`,
    needs code from the model's repository, is quantised in a format that is not supported, or is
    not a decoder-only language model. How it is quantised is left out: see quantization_of.
    """
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise OctavoError(
            f"{path}: no model_type; expected a config.json of transformers, such as"
            ' {"model_type": "llama", ...}'
        )
    if model_type not in CONFIG_MAPPING:
        raise _unknown_model_type(path, model_type, raw)
    read_quantization(path, raw)
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # config classes raise whatever their validation finds
        raise OctavoError(f"{path}: transformers refuses it: {_one_line(error)}") from error
    # With it transformers would build the modules of the format, of which Octavo traces none.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    check_causal(path, config)
    return config


def quantization_of(path: Path) -> dict[str, Any] | None:
    """The quantization_config of a config.json, None where there is none. Raises OctavoError."""
    return read_quantization(path, _read_json(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise OctavoError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OctavoError(f"{path} is not JSON: {_one_line(error)}") from None
    if not isinstance(raw, dict):
        raise OctavoError(f"{path}: expected a JSON object, got a {type(raw).__name__}")
    return raw


def _unknown_model_type(path: Path, model_type: str, raw: dict[str, Any]) -> OctavoError:
    version = transformers.__version__
    if "auto_map" in raw:
        return OctavoError(
            f"{path}: model_type '{model_type}' is defined by code in the model's repository"
            f" (auto_map), which Octavo does not run; transformers {version} has no class of its"
            " own for it; a newer transformers may"
        )
    return OctavoError(
        f"{path}: model_type '{model_type}' is unknown to transformers {version};"
        " upgrade transformers if the model is newer, or correct the name"
    )


def check_causal(path: Path, config: Any) -> None:
    """Raise OctavoError unless AutoModelForCausalLM makes a decoder-only model of `config`."""
    model_type = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise OctavoError(
            f"{path}: {model_type} is an encoder-decoder model; Octavo compiles decoder-only"
            " language models"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OctavoError(
            f"{path}: {model_type} has no causal language model class in transformers"
            f" {transformers.__version__}; Octavo compiles decoder-only language models"
        )
    # BERT and its kin have a causal class, but it attends both ways unless is_decoder is set.
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise OctavoError(
            f"{path}: {model_type} is an encoder-only model; Octavo compiles decoder-only language"
            ' models (set "is_decoder": true if this checkpoint was trained as one)'
        )


def choose_dtype(requested: str, config: Any, target: str) -> torch.dtype:
    """The dtype to compile in, for `requested` of auto, float32, bfloat16 or float16.

    The cpu target computes in float32 and bfloat16: PyTorch's float16 on the CPU is slow and loses
    range, so under auto a float16 checkpoint becomes float32 there, and float16 by name is refused.
    GPU targets run 16 bits under auto: the checkpoint's dtype if it has 16 bits, else bfloat16.
    A GGUF states no dtype: float32 on the cpu, bfloat16 on a GPU.
    """
    is_cpu = target == "cpu"
    if requested == "auto":
        stated = getattr(config, "dtype", None)
        if is_cpu:
            return torch.bfloat16 if stated == torch.bfloat16 else torch.float32
        return stated if stated in (torch.bfloat16, torch.float16) else torch.bfloat16
    if requested not in DTYPES:
        raise OctavoError(f"dtype '{requested}' is unknown; choose auto, {', '.join(DTYPES)}")
    if is_cpu and requested == "float16":
        raise OctavoError(
            "dtype float16 is not offered by the cpu target; choose --dtype float32 or bfloat16"
        )
    return DTYPES[requested]


def _one_line(error: Exception) -> str:
    """All of its text: transformers says what it validates first, and why it fails below that."""
    return " ".join(str(error).split())[:300] or type(error).__name__
