"""Make the AWQ checkpoint: python make_awq.py, with autoawq on PYTHONPATH.

AutoAWQ's search needs an old transformers; its rounding (AwqQuantizer.pseudo_quantize_tensor) and
its packing (WQLinear_GEMM.from_linear) are what defines the format, and both run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import awq
import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file
from tiny_llama import tiny_llama, write_dequantized

HERE = Path(__file__).parent
GROUP = 32


def main():
    directory = HERE / "awq-gemm"
    model = tiny_llama(torch.float16)
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight")
    settings = SimpleNamespace(w_bit=4, group_size=GROUP, zero_point=True)
    weights = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or path == "lm_head":
            continue
        rounded, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(settings, module.weight.data)
        linear = SimpleNamespace(
            weight=torch.nn.Parameter(rounded),
            bias=None,
            in_features=module.in_features,
            out_features=module.out_features,
        )
        packed = WQLinear_GEMM.from_linear(
            linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        del tensors[f"{path}.weight"]
        for name in ("qweight", "qzeros", "scales"):
            tensors[f"{path}.{name}"] = getattr(packed, name)
        weights[f"{path}.weight"] = dequantize_gemm(
            packed.qweight, packed.qzeros, packed.scales, 4, GROUP
        ).T
    directory.mkdir(exist_ok=True)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_dequantized(directory, f"autoawq {awq.__version__}", weights)


if __name__ == "__main__":
    main()
