"""Tiny configs of many architectures, and models of them with weights that make a difference.

model = tiny_model("gemma2", seed=0)          # a real Hugging Face model, float32
config = TINY["gemma2"]()                     # 2 to 4 layers, 64 wide, vocabulary of 256
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

NUM_POSITIONS = 256
WINDOW = 8

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
}
_GEMMA = {
    **_LLAMA,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GPT2 = {"vocab_size": 256, "n_positions": NUM_POSITIONS, "n_embd": 64, "n_layer": 2, "n_head": 4}
_NEOX = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": NUM_POSITIONS,
}


def _factory(model_type: str, base: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(model_type, **{**base, **_TOKENS, **more})


# The architectures that have to come out right, in float32 and bfloat16.
TINY: dict[str, Callable[[], Any]] = {
    "llama": _factory("llama", _LLAMA, tie_word_embeddings=False),
    "llama-tied": _factory("llama", _LLAMA, tie_word_embeddings=True),
    "qwen2": _factory("qwen2", _LLAMA, tie_word_embeddings=True),
    "qwen3": _factory("qwen3", _LLAMA, head_dim=16),
    "mistral": _factory("mistral", _LLAMA, sliding_window=WINDOW, head_dim=16),
    "gemma2": _factory("gemma2", _GEMMA, query_pre_attn_scalar=24),
    "gemma3_text": _factory("gemma3_text", _GEMMA, query_pre_attn_scalar=24),
    "gpt2": _factory("gpt2", _GPT2),
    "gpt_neox": _factory("gpt_neox", _NEOX, rotary_pct=0.5),
    "opt": _factory(
        "opt",
        _NEOX,
        ffn_dim=128,
        word_embed_proj_dim=64,
    ),
    "phi3": _factory("phi3", _LLAMA, sliding_window=WINDOW),
    "stablelm": _factory("stablelm", _LLAMA, use_qkv_bias=True, partial_rotary_factor=0.5),
    "cohere": _factory("cohere", _LLAMA, use_qk_norm=True, logit_scale=0.5),
}

# More, to see that nothing is fitted to those.
MORE: dict[str, Callable[[], Any]] = {
    "cohere2": _factory("cohere2", {**_GEMMA, "head_dim": 16}),
    "gemma": _factory("gemma", _LLAMA, head_dim=16),
    # Two global layers among five local ones: of the local groups the last has an empty place.
    "gemma3-local": _factory(
        "gemma3_text",
        _GEMMA,
        query_pre_attn_scalar=24,
        num_hidden_layers=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2
        + ["sliding_attention"],
    ),
    "glm": _factory("glm", _LLAMA, head_dim=16),
    "gpt_bigcode": _factory("gpt_bigcode", _GPT2, n_inner=128),
    "gptj": _factory("gptj", _GPT2, rotary_dim=8),
    "granite": _factory("granite", _LLAMA, attention_multiplier=0.3, residual_multiplier=0.5),
    "llama3-rope": _factory(
        "llama",
        _LLAMA,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "olmo": _factory("olmo", _LLAMA),
    "olmo2": _factory("olmo2", _LLAMA),
    "phi": _factory("phi", _LLAMA, partial_rotary_factor=0.5),
    "phi3-longrope": _factory(
        "phi3",
        _LLAMA,
        original_max_position_embeddings=48,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 48,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
        },
    ),
    "smollm3": _factory("smollm3", _LLAMA, no_rope_layers=[1, 0]),
    "starcoder2": _factory("starcoder2", _LLAMA, sliding_window=WINDOW),
    "yarn": _factory(
        "qwen3",
        _LLAMA,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Hugging Face model, eager, of a key of TINY or MORE; the same weights in every dtype.

    Weights keep activations at their size, biases and norms are not trivial, and logits are spread
    out enough for greedy decoding to wander.
    """
    config = {**TINY, **MORE}[name]()
    # Built in the dtype, not converted: Hugging Face keeps rotary frequencies in float32.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    _randomise(model, seed)
    return model.eval()


@torch.no_grad()
def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if isinstance(module, nn.Embedding):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() > 1:
                # nn.Linear is [out, in]; GPT-2's Conv1D is [in, out].
                fan_in = parameter.shape[0 if type(module).__name__ == "Conv1D" else 1]
                parameter.copy_(noise * 1.5 * fan_in**-0.5)
            elif name == "bias":
                parameter.copy_(0.1 * noise)
            else:
                parameter.add_(0.2 * noise)
