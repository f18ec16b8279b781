"""What a calibration found, on disk: matrices and scales, read by key while a model is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.codegen.quant_layouts import find_layout
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPES, QuantType


class _Source(Protocol):
    def load(self, key: str) -> Tensor: ...

    def buffer(self, key: str) -> Tensor: ...

    def load_quantized(self, key: str) -> QuantTensor: ...


class CodeStore:
    """A source of weights that answers for what a calibration made, and asks ``base`` for the rest.

    Matrices lie in files of a folder, those of 4 bits packed; the folder is its owner's to remove.
    """

    def __init__(self, folder: Path, base: _Source) -> None:
        self._folder = folder
        self._base = base
        self._matrices: dict[str, tuple[QuantType, Path]] = {}
        self._buffers: dict[str, Tensor] = {}

    def add_matrix(self, key: str, matrix: QuantTensor) -> None:
        """Keep a quantised matrix."""
        path = self._folder / f"{len(self._matrices):05}.safetensors"
        parts = find_layout(_layout(matrix.scheme)).pack(matrix)
        # As bytes where safetensors may lack the dtype.
        plain = {name: part.contiguous().view(torch.uint8) for name, part in parts.items()}
        save_file(plain, path)
        self._matrices[key] = (QuantType(matrix.scheme, matrix.shape), path)

    def add_buffer(self, key: str, tensor: Tensor) -> None:
        """Keep the scales of an input, or what they make of its maker."""
        self._buffers[key] = tensor

    def load(self, key: str) -> Tensor:
        """A tensor of the checkpoint."""
        return self._base.load(key)

    def buffer(self, key: str) -> Tensor:
        """A buffer of the model, or scales."""
        found = self._buffers.get(key)
        return self._base.buffer(key) if found is None else found

    def load_quantized(self, key: str) -> QuantTensor:
        """A matrix that was kept, or one of the checkpoint."""
        if key not in self._matrices:
            return self._base.load_quantized(key)
        kind, path = self._matrices[key]
        layout = find_layout(_layout(kind.scheme))
        stored = load_file(path)
        declared = layout.part_types(kind)
        return layout.unpack(
            {name: part.view(DTYPES[declared[name].dtype]) for name, part in stored.items()}, kind
        )


def _layout(scheme: QuantScheme) -> str:
    return "nibbles" if scheme.format.bits == 4 else "plain"
