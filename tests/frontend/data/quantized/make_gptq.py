"""Make the GPTQ checkpoints: python make_gptq.py, with gptqmodel on PYTHONPATH."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import gptqmodel
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tiny_llama import keep_only_the_checkpoint, tiny_llama, write_dequantized
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
CHECKPOINTS = {
    "gptq-4bit": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq-4bit-act-order": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq-v2-4bit": {
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "desc_act": False,
        "format": "gptq_v2",
    },
    "gptq-8bit": {"bits": 8, "group_size": -1, "sym": True, "desc_act": False},
    "gptq-8bit-zeros": {"bits": 8, "group_size": 32, "sym": False, "desc_act": True},
}


def write_base(directory):
    tiny_llama(torch.float16).save_pretrained(directory)
    write_tokenizer(directory)


def write_tokenizer(directory):
    words = {f"t{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(directory)


def texts():
    for seed in range(32):
        ids = torch.randint(0, 64, (48,), generator=torch.Generator().manual_seed(seed))
        yield " ".join(f"t{int(i)}" for i in ids)


def main():
    with tempfile.TemporaryDirectory() as base:
        write_base(base)
        for name, settings in CHECKPOINTS.items():
            config = QuantizeConfig(**settings, act_group_aware=False, device="cpu")
            model = GPTQModel.load(base, config)
            model.quantize(list(texts()), batch_size=1)
            model.save(str(HERE / name))
            forget_the_machine(HERE / name / "config.json")
            # In the dtype of the scales: under "auto" the library would round these to bfloat16.
            loaded = GPTQModel.load(
                str(HERE / name), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16
            )
            weights = {
                f"{path}.weight": module.dequantize_weight().T
                for path, module in loaded.model.named_modules()
                if hasattr(module, "dequantize_weight")
            }
            write_dequantized(HERE / name, f"gptqmodel {gptqmodel.__version__}", weights)
            keep_only_the_checkpoint(HERE / name)


def forget_the_machine(path):
    config = json.loads(path.read_text())
    del config["quantization_config"]["meta"]["offload_to_disk_path"]
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
