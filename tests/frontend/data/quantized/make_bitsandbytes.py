"""Make the checkpoints of bitsandbytes: python make_bitsandbytes.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import bitsandbytes
import torch
from tiny_llama import keep_only_the_checkpoint, tiny_llama, write_dequantized
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

HERE = Path(__file__).parent
CHECKPOINTS = {
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "bnb-int8": {"load_in_8bit": True},
}


def dequantized(module):
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        return bitsandbytes.functional.dequantize_4bit(
            module.weight.data, module.weight.quant_state
        )
    wide = bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    return wide.to(torch.bfloat16)  # as transformers takes it into a model


def main():
    with tempfile.TemporaryDirectory() as base:
        tiny_llama(torch.bfloat16).save_pretrained(base)
        for name, settings in CHECKPOINTS.items():
            model = AutoModelForCausalLM.from_pretrained(
                base,
                quantization_config=BitsAndBytesConfig(**settings),
                dtype=torch.bfloat16,
                device_map="cpu",
            )
            model.save_pretrained(HERE / name)
            loaded = AutoModelForCausalLM.from_pretrained(
                HERE / name, dtype=torch.bfloat16, device_map="cpu"
            )
            kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
            weights = {
                f"{path}.weight": dequantized(module)
                for path, module in loaded.named_modules()
                if isinstance(module, kinds)
            }
            write_dequantized(HERE / name, f"bitsandbytes {bitsandbytes.__version__}", weights)
            keep_only_the_checkpoint(HERE / name)


if __name__ == "__main__":
    main()
