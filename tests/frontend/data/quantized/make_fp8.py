"""Make the FP8 checkpoints of transformers: python make_fp8.py.

Rounding a model as it is loaded needs a GPU there; the operation that does it runs on its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import save_file
from tiny_llama import tiny_llama, write_dequantized
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

HERE = Path(__file__).parent
CHECKPOINTS = {
    "fp8-blocks": FineGrainedFP8Config(weight_block_size=(128, 128)),
    "fp8-tensor": FineGrainedFP8Config(weight_block_size=None, activation_scheme="static"),
}


def main():
    for name, config in CHECKPOINTS.items():
        # Every matrix has to be made of whole blocks.
        model = tiny_llama(torch.bfloat16, hidden_size=128, num_key_value_heads=4)
        tensors = dict(model.state_dict())
        tensors.pop("lm_head.weight")
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
        paths = [
            path
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and path != "lm_head"
        ]
        for path in paths:
            key = f"{path}.weight"
            tensors.update(quantize.convert({key: tensors.pop(key)}))
            if config.activation_scheme == "static":
                scale = f"{path}.weight_scale_inv"
                tensors[scale] = tensors[scale].reshape(())  # as such checkpoints have it
                tensors[f"{path}.activation_scale"] = torch.tensor(0.05)
        directory = HERE / name
        directory.mkdir(exist_ok=True)
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        described = model.config.to_dict()
        described["architectures"] = ["LlamaForCausalLM"]
        described["quantization_config"] = {
            **config.to_dict(),
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.norm"],
        }
        text = json.dumps(described, indent=2, default=str)
        (directory / "config.json").write_text(text + "\n")
        loaded = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.bfloat16,
            quantization_config=FineGrainedFP8Config(
                dequantize=True, weight_block_size=config.weight_block_size
            ),
        )
        state = loaded.state_dict()
        weights = {f"{path}.weight": state[f"{path}.weight"] for path in paths}
        write_dequantized(directory, f"transformers {transformers.__version__}", weights)


if __name__ == "__main__":
    main()
