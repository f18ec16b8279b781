"""The checkpoints that the formats' own libraries made, opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from octavo.frontend.checkpoint import open_checkpoint
from octavo.frontend.quantized.methods import open_quantized, read_quantization
from octavo.frontend.quantized.packed_store import PackedStore

DATA = Path(__file__).parent / "data" / "quantized"
NAMES = sorted(path.name for path in DATA.iterdir() if (path / "config.json").is_file())


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


def open_named(name: str) -> PackedStore:
    """The store of one of the checkpoints."""
    return open_directory(DATA / name)


def open_directory(directory: Path) -> PackedStore:
    """The store of a checkpoint directory."""
    path = directory / "config.json"
    config = read_quantization(path, read_json(path))
    assert config is not None
    return open_quantized(open_checkpoint(directory), config)


def library_digests(name: str) -> dict[str, Any]:
    """What the library makes of its checkpoint: by weight, dtype, shape and SHA-256."""
    return dict(read_json(DATA / name / "dequantized.json")["weights"])


def digest(values: torch.Tensor) -> str:
    """SHA-256 of the values, minus zero as zero."""
    data = (values + 0.0).contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
