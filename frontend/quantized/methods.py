"""Which quantised formats can be read, by the quant_method that config.json states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.quantizers.quantizers_utils import should_convert_module

from octavo.frontend.quantized.awq import find_awq
from octavo.frontend.quantized.bitsandbytes import find_bitsandbytes
from octavo.frontend.quantized.compressed_tensors import find_compressed, is_ignored
from octavo.frontend.quantized.fp8 import find_fp8
from octavo.frontend.quantized.gptq import find_gptq
from octavo.frontend.quantized.mxfp4 import find_mxfp4
from octavo.frontend.quantized.packed_store import Found, PackedStore
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError

_FINDERS: dict[str, Callable[[TensorStore, Mapping[str, Any]], Found]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed,
    "fp8": find_fp8,
    "bitsandbytes": find_bitsandbytes,
    "mxfp4": find_mxfp4,
}
# Lists of modules that a format's own loader leaves in float, by the names of its settings.
_LEFT_ALONE = ("modules_to_not_convert", "llm_int8_skip_modules")


def read_quantization(path: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, None where there is none.

    Raises OctavoError, naming the method, for one that cannot be read.
    """
    config = raw.get("quantization_config", raw.get("compression_config"))
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method not in _FINDERS:
        raise OctavoError(
            f"{path}: quant_method {method or 'unknown'} is not supported (supported:"
            f" {', '.join(_FINDERS)}, and GGUF files); use one of those, or the unquantised"
            " checkpoint with --quant"
        )
    return dict(config)


def open_quantized(store: TensorStore, config: Mapping[str, Any]) -> PackedStore:
    """The checkpoint with each quantised weight under its own name.

    Reads headers and small tensors. Raises OctavoError where tensors are missing, where the config
    has a setting that is not supported, and where it says that a module is not quantised that is.
    """
    method = config["quant_method"]
    found = _FINDERS[method](store, config)
    if not found.weights:
        raise OctavoError(
            f"config.json says quant_method {method}, but no weight is stored quantised;"
            " config.json and the weights are of different checkpoints"
        )
    _check_left_alone(found, config)
    return PackedStore(store, found)


def _check_left_alone(found: Found, config: Mapping[str, Any]) -> None:
    for setting in _LEFT_ALONE:
        patterns = config.get(setting) or []
        for name in found.weights:
            if not should_convert_module(name.removesuffix(".weight"), patterns):
                raise _contradiction(name, setting)
    if config["quant_method"] == "compressed-tensors":
        for name in found.weights:
            if is_ignored(name.removesuffix(".weight"), config):
                raise _contradiction(name, "ignore")


def _contradiction(name: str, setting: str) -> OctavoError:
    return OctavoError(
        f"{name} is stored quantised, but {setting} of config.json says that it is not;"
        " config.json and the weights are of different checkpoints"
    )
