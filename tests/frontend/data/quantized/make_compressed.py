"""Make the checkpoints of compressed-tensors: python make_compressed.py."""

from __future__ import annotations

from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from tiny_llama import keep_only_the_checkpoint, tiny_llama, write_dequantized

HERE = Path(__file__).parent
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}
TOKENS = {"strategy": "token", "dynamic": True}
BLOCKS = {"strategy": "block", "block_structure": [48, 48]}  # so that the last ones are cut
GROUPS = {"strategy": "group", "group_size": 128, "dynamic": True}
# weights, activations
CHECKPOINTS = {
    "ct-w4a16": (INT4, None),
    "ct-w4a16-zeros": ({**INT4, "symmetric": False}, None),
    "ct-w8a16": (INT8, None),
    "ct-w8a16-zeros": ({**INT8, "symmetric": False}, None),
    "ct-w8a8-int": (INT8, {"num_bits": 8, "type": "int", **TOKENS}),
    "ct-fp8-tensor": ({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "ct-fp8-channel": ({**FP8, "strategy": "channel"}, {**FP8, **TOKENS}),
    "ct-fp8-block": ({**FP8, **BLOCKS}, {**FP8, **GROUPS}),
}


def main():
    for name, (weights, activations) in CHECKPOINTS.items():
        model = tiny_llama(torch.bfloat16)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            set_scales(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(HERE / name)
        compressor.update_config(str(HERE / name))
        compressor.decompress_model(model)
        read = {
            f"{path}.weight": module.weight
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and path != "lm_head"
        }
        write_dequantized(HERE / name, f"compressed-tensors {compressed_tensors.__version__}", read)
        keep_only_the_checkpoint(HERE / name)


def set_scales(module):
    """The library's own rule for scales and zeros, on the range of each block of a weight."""
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data.fill_(0.05)
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None or scheme.weights is None:
        return
    rows, columns = module.weight.shape
    up, across = block_of(scheme.weights, rows, columns)
    padded = torch.nn.functional.pad(module.weight.data, (0, -columns % across, 0, -rows % up))
    blocks = padded.view(padded.shape[0] // up, up, padded.shape[1] // across, across)
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
    module.weight_scale.data.copy_(scales.view(module.weight_scale.shape))
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data.copy_(zeros.view(module.weight_zero_point.shape))
    module.quantization_status = QuantizationStatus.FROZEN


def block_of(settings, rows, columns):
    if settings.strategy == "block":
        return settings.block_structure
    if settings.strategy == "group":
        return 1, settings.group_size
    return (rows if settings.strategy == "tensor" else 1), columns


if __name__ == "__main__":
    main()
