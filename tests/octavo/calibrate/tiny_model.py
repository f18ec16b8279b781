"""A model of the zoo with random weights, as a calibration sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.calibrate.calibrate import graph_before_quantization
from octavo.ir.random_inputs import RandomSource

Traced = Callable[[str, Any], Any]

SEQUENCES = [[7, 42, 3, 3, 250, 17, 99, 128, 5, 64, 31], [200, 1, 77, 13, 8, 190], [9] * 40]


class TinyModel:
    """A model of the zoo with random weights, and its graph before quantisation."""

    def __init__(self, traced: Traced, name: str, dtype: torch.dtype, target: str = "cpu") -> None:
        imported = traced(name, dtype)
        self.imported, self.max_position = imported.graph, imported.max_position
        random = RandomSource(imported.graph)
        self.weights = TinyWeights(random, imported.buffers)
        self.graph = graph_before_quantization(
            imported.graph, max_position=imported.max_position, target=target
        )


class TinyWeights:
    def __init__(self, random: RandomSource, buffers: dict[str, Tensor]) -> None:
        self.load = random.load
        self._buffers = buffers

    def buffer(self, key: str) -> Tensor:
        return self._buffers[key]

    def load_quantized(self, key: str) -> Any:
        raise KeyError(key)
