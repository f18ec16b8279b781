"""A transformers config from the metadata of a GGUF file.

Keys are mapped by transformers' own table (transformers.integrations.ggml), which this completes:
it leaves out RoPE scaling and some sizes, and a value left out would silently be the class
default.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from gguf import quants
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.frontend.checkpoint import read_into
from octavo.frontend.gguf_header import GgufHeader
from octavo.ir.errors import OctavoError

# GGUF architecture -> transformers model_type, for those whose every converted detail is undone.
# Left out on purpose: falcon (its QKV is reordered for more than one group), deci and granite
# (permuted Q and K that transformers does not undo), stablelm and nemotron (partial rotary is not
# mapped).
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}

# What transformers' table lacks: GGUF key without the architecture -> config attribute.
_MORE_KEYS = {
    "llama": {"attention.key_length": "head_dim"},
    "qwen2": {"attention.key_length": "head_dim"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3_moe": {
        "attention.key_length": "head_dim",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "starcoder2": {
        "rope.freq_base": "rope_theta",
        "attention.sliding_window": "sliding_window",
    },
}

# Gemma 2 and 3 of 27B scale attention by hidden / heads, not by head_dim; GGUF does not say so and
# llama.cpp goes by the number of layers, as is done here.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

ROPE_FREQS = "rope_freqs.weight"


def gguf_config(header: GgufHeader) -> Any:
    """The config that the file describes, dtype unset (a GGUF states none).

    Raises OctavoError for an architecture, a RoPE scaling or an expert layout that is not
    supported.
    """
    architecture = header.architecture
    if architecture not in MODEL_TYPES:
        raise OctavoError(
            f"{header.path.name}: GGUF architecture '{architecture}' is not supported yet"
            f" (supported: {', '.join(sorted(MODEL_TYPES))}); use the model's safetensors"
            " checkpoint"
        )
    model_type = MODEL_TYPES[architecture]
    values = _mapped_values(header, model_type)
    _set_sizes(header, values)
    _set_rope_scaling(header, values)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # config classes raise whatever their validation finds
        raise OctavoError(
            f"{header.path.name}: transformers {transformers.__version__} refuses its config:"
            f" {str(error).strip().splitlines()[0]}"
        ) from error
    _restore_rope_freqs(header, config)
    return config


def _mapped_values(header: GgufHeader, model_type: str) -> dict[str, Any]:
    # transformers' table is keyed by its own name of the architecture, not always the model type.
    table_name = "gemma3" if model_type == "gemma3_text" else model_type
    mapping: dict[str, dict[str, str | None]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
    table = {**mapping[table_name], **_MORE_KEYS.get(table_name, {})}
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(table_name) or {})
    for gguf_key, attribute in table.items():
        value = header.metadata.get(f"{header.architecture}.{gguf_key}")
        if attribute is not None and value is not None:
            values[attribute] = value
    for gguf_key, attribute in mapping["tokenizer"].items():
        if attribute:  # None where the file is silent: the class default is another model's id
            values[attribute] = header.metadata.get(f"tokenizer.{gguf_key}")
    return values


def _set_sizes(header: GgufHeader, values: dict[str, Any]) -> None:
    architecture = header.architecture
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if f"{architecture}.{key}" not in header.metadata:
            raise OctavoError(
                f"{header.path.name} states no {architecture}.{key}; it is incomplete"
            )
    if architecture != "qwen3moe" and header.metadata.get(f"{architecture}.expert_count"):
        raise OctavoError(
            f"{header.path.name}: {architecture} with experts (Mixtral) is not supported as GGUF"
            " yet; use the model's safetensors checkpoint"
        )
    # llama.cpp writes the output matrix only when it is not the embedding.
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        # The matrix is the truth: vocab_size is absent in many files, and the token list may be
        # shorter.
        values["vocab_size"] = embedding.shape[0]
    num_layers = header.metadata[f"{architecture}.block_count"]
    if num_layers == _GEMMA_27B_LAYERS.get(architecture):
        values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]


def _set_rope_scaling(header: GgufHeader, values: dict[str, Any]) -> None:
    prefix = f"{header.architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    if any(name.startswith("rope_factors_") for name in header.tensors):
        kind = "longrope"
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported_rope(header, f"scaling '{kind}'")
    _set_rotary_dim(header, values)
    factor = header.metadata.get(f"{prefix}.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return
    scaling = {"rope_type": kind, "factor": factor, "rope_theta": values.pop("rope_theta", 10000.0)}
    if kind == "yarn":
        original = header.metadata.get(f"{prefix}.original_context_length")
        if original is None:
            raise _unsupported_rope(header, "scaling 'yarn' without original_context_length")
        scaling["original_max_position_embeddings"] = original
    if header.architecture == "gemma3":
        # Only the global layers are scaled; the local ones keep transformers' default.
        local = {"rope_type": "default", "rope_theta": 10000.0}
        values["rope_parameters"] = {"full_attention": scaling, "sliding_attention": local}
    else:
        values["rope_parameters"] = scaling


def _set_rotary_dim(header: GgufHeader, values: dict[str, Any]) -> None:
    rotary_dim = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    head_dim = values.get("head_dim")
    if head_dim is None and "num_attention_heads" in values:
        head_dim = values["hidden_size"] // values["num_attention_heads"]
    if rotary_dim is None or rotary_dim == head_dim:
        return
    if header.architecture != "phi3":  # the only one here whose class rotates a part of the head
        raise _unsupported_rope(header, f"over {rotary_dim} of {head_dim} dimensions")
    values["partial_rotary_factor"] = rotary_dim / head_dim


def _unsupported_rope(header: GgufHeader, what: str) -> OctavoError:
    return OctavoError(
        f"{header.path.name}: RoPE {what} is not supported as GGUF yet; use the model's safetensors"
        " checkpoint"
    )


def _restore_rope_freqs(header: GgufHeader, config: Any) -> None:
    """Llama 3's scaling is stored as a tensor of divisors of the frequencies; find its parameters.

    Raises OctavoError if the parameters that Meta published do not give those divisors.
    """
    tensor = header.tensors.get(ROPE_FREQS)
    if tensor is None:
        return
    data = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    read_into(header.path, tensor.offset, data)
    divisors = torch.from_numpy(quants.dequantize(data.numpy(), tensor.type).copy())
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, 2 * len(divisors), 2) / (2 * len(divisors)))
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(scaled, plain / divisors, rtol=1e-4, atol=0.0):
        raise _unsupported_rope(header, f"scaling in {ROPE_FREQS} that is not Llama 3's")
