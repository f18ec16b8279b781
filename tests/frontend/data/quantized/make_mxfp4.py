"""Make the MXFP4 checkpoint of a tiny gpt-oss: python make_mxfp4.py.

compressed-tensors rounds and packs each expert; transformers reads the stacks, dequantised.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from tiny_llama import write_dequantized
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"],
    "tie_word_embeddings": True,
}


def packed(matrix, scheme: QuantizationScheme):
    """u8 blocks ``[N, K / 32, 16]`` and exponents ``[N, K / 32]`` of a matrix ``[N, K]``."""
    groups = matrix.view(matrix.shape[0], -1, 32)
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": matrix, "weight_scale": scales}
    made = MXFP4PackedCompressor.compress(state, scheme)
    return made["weight_packed"].view(*groups.shape[:2], 16), made["weight_scale"]


def main():
    torch.manual_seed(6)
    config = AutoConfig.for_model("gpt_oss", **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight", None)
    names = [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    for name in names:
        stack = torch.randn_like(tensors.pop(name), dtype=torch.float32) * 0.1
        experts = [packed(matrix.T.contiguous().bfloat16(), scheme) for matrix in stack]
        tensors[f"{name}_blocks"] = torch.stack([blocks for blocks, _ in experts])
        tensors[f"{name}_scales"] = torch.stack([scales for _, scales in experts])
    for name, value in tensors.items():
        if value.is_floating_point():
            tensors[name] = torch.randn(value.shape).mul(0.1).to(value.dtype)
    directory = HERE / "mxfp4-gpt-oss"
    directory.mkdir(exist_ok=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict()
    described["architectures"] = ["GptOssForCausalLM"]
    described["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2, default=str) + "\n")
    loaded = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    state = loaded.state_dict()
    write_dequantized(
        directory,
        f"transformers {transformers.__version__}",
        {name: state[name] for name in names},
    )


if __name__ == "__main__":
    main()
