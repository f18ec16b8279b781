"""Weights drawn at random, the same on every machine, for a model that has only a config."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.frontend.weights import TensorInfo, tied_names

_CHUNK = 1 << 20  # elements drawn at once: bounds the working memory at about 16 MB


class RandomWeights:
    """A WeightSource that makes each tensor from (seed, name) alone, in any order.

    Matrices: standard deviation fan_in ** -0.5 with fan_in the last dimension, so that activations
    keep their size at any width and a tiny model is not degenerate (with transformers' usual 0.02
    the logits of a 64-wide model hardly depend on the input). Vectors named `*weight`: 1 + 0.1 x,
    they are norms. Other vectors (biases, sinks): 0.02 x. Integer tensors: zero. Drawn in fp32,
    then cast to the config's dtype (float32 when it states none).
    """

    def __init__(self, model: Any, config: Any, seed: int) -> None:
        ties = tied_names(model)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        self._seed = seed
        self._infos = {
            key: TensorInfo(tuple(value.shape), dtype if value.is_floating_point() else value.dtype)
            for key, value in model.state_dict().items()
            if key not in ties
        }

    def keys(self) -> Collection[str]:
        return self._infos.keys()

    def info(self, key: str) -> TensorInfo:
        return self._infos[key]

    def load(self, key: str) -> torch.Tensor:
        info = self._infos[key]
        if not info.dtype.is_floating_point:
            return torch.zeros(info.shape, dtype=info.dtype)
        values = torch.from_numpy(bell_curve(self._seed, key, torch.Size(info.shape).numel()))
        if len(info.shape) >= 2:
            values *= float(info.shape[-1]) ** -0.5
        elif key.endswith("weight"):
            values.mul_(0.1).add_(1)
        else:
            values *= 0.02
        return values.reshape(info.shape).to(info.dtype)


def bell_curve(seed: int, name: str, count: int) -> npt.NDArray[np.float32]:
    """`count` fp32 values of mean 0 and variance 1, keyed by seed and name.

    Each is the sum of four 16-bit uniforms (Irwin-Hall), scaled. Normal variates would go through
    log and cos, whose last bit differs between CPUs and C libraries; integer sums do not.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key)
    # Four uniforms on 0..65535: mean 2 * 65535, variance (65536 ** 2 - 1) / 3.
    scale = np.float32(((65536**2 - 1) / 3) ** -0.5)
    out = np.empty(count, dtype=np.float32)
    for start in range(0, count, _CHUNK):
        part = out[start : start + _CHUNK]
        words = bits.random_raw(len(part)).astype("<u8", copy=False).view("<u2").reshape(-1, 4)
        centred = words.sum(axis=1, dtype=np.int32) - np.int32(2 * 65535)
        np.multiply(centred.astype(np.float32), scale, out=part)
    return out
