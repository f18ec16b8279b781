"""Tiny Hugging Face models, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TinyModel = Callable[..., Any]

_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "head_dim": 8,
    },
    "mixtral": {"num_local_experts": 4},
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of two layers, 32 wide, with a vocabulary of 99."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if model_type == "gpt2":
        sizes = {}
    if model_type in ("gpt_neox", "opt"):
        del sizes["num_key_value_heads"]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    values = {**sizes, **special, "vocab_size": 99, **_SIZES.get(model_type, {}), **overrides}
    return AutoConfig.for_model(model_type, **values)


@pytest.fixture
def tiny_model() -> TinyModel:
    """`tiny_model(model_type, **config)`: a model with every parameter random, norms included."""

    def make(model_type: str, **overrides: Any) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return model

    return make


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(name="on_meta")
def on_meta_fixture() -> Callable[[Any], Any]:
    """`on_meta(config)`: the model with no memory behind its tensors."""
    return on_meta


@pytest.fixture
def saved_llama(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """The directory of a tiny llama in one safetensors file."""
    directory = tmp_path / "tiny-llama"
    tiny_model("llama").save_pretrained(directory)
    return directory
