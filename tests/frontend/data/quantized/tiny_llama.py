"""The model that the checkpoints here are made of, and the digests of what a library reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def tiny_llama(dtype, **sizes):
    torch.manual_seed(5)
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def write_dequantized(directory, library, weights):
    """Digests of the values, minus zero as zero: which of the two a product is means nothing."""
    entries = {}
    for name, value in sorted(weights.items()):
        data = (value.detach().cpu() + 0.0).contiguous()
        digest = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()
        dtype = str(data.dtype).removeprefix("torch.")
        entries[name] = {"dtype": dtype, "shape": list(data.shape), "sha256": digest}
    text = json.dumps({"library": library, "weights": entries}, indent=1)
    (Path(directory) / "dequantized.json").write_text(text + "\n")


def keep_only_the_checkpoint(directory):
    for path in Path(directory).iterdir():
        if path.name not in ("config.json", "model.safetensors", "dequantized.json"):
            path.unlink()
