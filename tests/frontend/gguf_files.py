"""Writes GGUF files from Hugging Face models as llama.cpp's convert_hf_to_gguf.py does.

Names and transformations are spelled out here, not taken from the tables that the reader uses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NAMES = {
    "gemma2": _GEMMA_NAMES,
    "gemma3_text": _GEMMA_NAMES,
    "gpt2": _GPT2_NAMES,
}
# Where the f16 scales of a block lie, and what the second is of the first: about half the codes, so
# that the numbers of a block lie on both sides of zero.
_SCALE_AT = {"Q6_K": 208}
_OFFSETS = {"Q4_1": -8, "Q4_K": 8, "Q5_K": 16}
_ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def write_gguf(
    path: Path,
    model: Any,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Array] | None = None,
    quantize: gguf.GGMLQuantizationType | None = None,
    pack: Callable[[Array, gguf.GGMLQuantizationType], npt.NDArray[np.uint8]] | None = None,
) -> None:
    """Write `model` to `path`; matrices are quantised when `quantize` is given, by `pack`."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    for key, value in (metadata or {}).items():
        _add(writer, key.replace("{arch}", architecture), value)
    tensors = {**_tensors(model), **(extra or {})}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    for name, value in tensors.items():
        value = np.ascontiguousarray(value)
        if quantize is not None and value.ndim >= 2:
            packed = (pack or gguf.quants.quantize)(value, quantize)
            writer.add_tensor(name, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(
    kind: gguf.GGMLQuantizationType, rows: int, columns: int, *, deviation: float
) -> npt.NDArray[np.uint8]:
    """Rows of a quantised type: any bytes, but for scales that are small numbers.

    The gguf package rounds to none of the K types, but reads them all.
    """
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(rows * columns)
    blocks = draw.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scales = draw.normal(0, deviation, len(blocks)).astype(np.float16)
    start = _SCALE_AT.get(kind.name, 0)
    blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    if kind.name in _OFFSETS:
        blocks[:, 2:4] = (_OFFSETS[kind.name] * scales[:, None]).view(np.uint8)
    return blocks.reshape(rows, -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)


def _tensors(model: Any) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for key, parameter in model.state_dict().items():
        value = parameter.numpy()
        if key.endswith("experts.gate_up_proj"):
            layer = key.split(".")[2]
            gate, up = np.split(value, 2, axis=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up
        else:
            name = _gguf_name(model.config.model_type, key)
            tensors[name] = _transform(model.config, name, value)
    return tensors


def _gguf_name(model_type: str, key: str) -> str:
    stem, suffix = (key, "weight") if "experts" in key else key.rsplit(".", 1)
    parts = stem.split(".")
    names = _NAMES.get(model_type, _LLAMA_NAMES)
    if parts[1:2] in (["layers"], ["h"]):
        return f"blk.{parts[2]}.{names['.'.join(parts[3:])]}.{suffix}"
    return f"{names[stem]}.{suffix}"


def _transform(config: Any, name: str, value: Array) -> Array:
    if config.model_type == "llama" and (".attn_q." in name or ".attn_k." in name):
        is_q = ".attn_q." in name
        heads = config.num_attention_heads if is_q else config.num_key_value_heads
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)
    if config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return value + 1
    if config.model_type == "gpt2" and "blk" in name and value.ndim == 2:
        return value.T
    return value
