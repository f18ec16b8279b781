"""FP8 checkpoints of quant_method ``fp8``: by blocks, as DeepSeek and Qwen3 ship, or by tensor.

``weight`` f8e4m3 ``[N, K]`` beside ``weight_scale_inv``, which in spite of its name is what the
codes are multiplied by: one number for each block of ``weight_block_size``, or for the whole
matrix. Some writers call it ``weight_scale``. Source: transformers, integrations/finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.frontend.quantized.packed_matrix import (
    PackedMatrix,
    check_part,
    check_scales,
    checked,
    dtype_name,
    part_info,
)
from octavo.frontend.quantized.packed_store import Found, refuse_setting
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor

_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale")
# Static scales of x: a kernel that rounds x takes the scale of each row as it comes, which is
# nearer to the numbers than one scale of a calibration.
_ACTIVATION_SUFFIXES = ("activation_scale", "input_scale", "input_zero_point")
# Scales of the KV cache: of the attention, or in older files of what its projections give out.
_KV_SUFFIXES = {
    ".k_scale": ".k_scale",
    ".v_scale": ".v_scale",
    ".k_proj.k_scale": ".k_scale",
    ".v_proj.v_scale": ".v_scale",
    ".k_proj.output_scale": ".k_scale",
    ".v_proj.output_scale": ".v_scale",
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def find_fp8(store: TensorStore, config: Mapping[str, Any]) -> Found:
    """The quantised weights of an FP8 checkpoint. Raises OctavoError for what is not supported."""
    block = _block(config)
    x_block = block[1] if block[0] is not None else None
    weights: dict[str, PackedMatrix] = {}
    for name in store.names():
        if name.endswith(".weight") and store.info(name).dtype == torch.float8_e4m3fn:
            weights[name] = Fp8Matrix(store, name, _scales_of(store, name), block, x_block)
        elif store.info(name).dtype == torch.float8_e5m2:
            raise OctavoError(f"{name} is stored as f8e5m2, which is not supported; use e4m3")
    return Found(weights, activation_scales(store), kv_scale_names(store))


def _block(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise refuse_setting("fp8", f"activation_scheme {scheme!r}", "use dynamic or static")
    if config.get("fmt", "e4m3") != "e4m3":
        raise refuse_setting("fp8", f"fmt {config['fmt']!r}", "use e4m3")
    block = config.get("weight_block_size")
    if block is None:
        return None, None
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise refuse_setting("fp8", f"weight_block_size {block}", "use two sizes, as [128, 128]")
    return block[0], block[1]


def _scales_of(store: TensorStore, name: str) -> str:
    stem = name.removesuffix("weight")
    found = [stem + suffix for suffix in _SCALE_SUFFIXES if stem + suffix in store.names()]
    return found[0] if found else stem + _SCALE_SUFFIXES[0]  # missing: told when it is read


def activation_scales(store: TensorStore) -> dict[str, str]:
    """Tensors that hold static scales of x, with the reason that they are not used."""
    reason = "a static scale of activations; rows are scaled as they come"
    return {
        name: reason for name in store.names() if name.rpartition(".")[2] in _ACTIVATION_SUFFIXES
    }


def kv_scale_names(store: TensorStore) -> dict[str, str]:
    """Tensors that hold scales of the KV cache, by the names that these go by."""
    found: dict[str, str] = {}
    for name in store.names():
        endings = [suffix for suffix in _KV_SUFFIXES if name.endswith(suffix)]
        if endings:
            longest = max(endings, key=len)
            found[name.removesuffix(longest) + _KV_SUFFIXES[longest]] = name
    return found


class Fp8Matrix(PackedMatrix):
    """FP8 codes and one scale a block, a row, a group or a tensor."""

    def __init__(
        self,
        store: TensorStore,
        name: str,
        scales: str,
        block: tuple[int | None, int | None],
        x_block: int | None = None,
        *,
        rounds_x: bool = True,
    ) -> None:
        super().__init__(store, name, (name, scales))
        self._scales = scales
        self._block = block
        self._x_block = x_block
        self._rounds_x = rounds_x

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.store.info(self.name).shape
        if len(shape) != 2:
            raise OctavoError(f"{self.name} has {len(shape)} dimensions, expected 2")
        return shape[0], shape[1]

    def scheme(self) -> QuantScheme:
        dtype = part_info(self.store, self._scales, self.name).dtype
        x = "f8e4m3" if self._rounds_x else None
        scale = "f8e8m0" if dtype in _EXPONENTS else dtype_name(dtype)
        return QuantScheme("f8e4m3", self._block, scale, x=x, x_block=self._x_block if x else None)

    def read(self) -> QuantTensor:
        check_part(self.store, self._scales, self.name, dtypes=(*_FLOATS, *_EXPONENTS))
        codes = self.store.read(self.name)
        if bool(codes.float().isnan().any()):
            raise OctavoError(
                f"{self.name} holds a NaN; the checkpoint is damaged, download or export it again"
            )
        return checked(QuantTensor(self.scheme(), codes, self._read_scales()))

    def _read_scales(self) -> Tensor:
        expected = self.scheme().scale_shape(*self.shape)
        scales = self.store.read(self._scales)
        is_scalar = scales.numel() == 1 == expected[0] * expected[1]
        if not is_scalar and tuple(scales.shape) != expected:
            raise OctavoError(
                f"{self._scales} has the shape {list(scales.shape)}, expected {list(expected)} for"
                f" {self.name} of {list(self.shape)}; check the block size in config.json"
            )
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        check_scales(self._scales, scales)
        return scales.view(expected)
