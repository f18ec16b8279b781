"""Binds a program to its weights and caches, and runs steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.runtime.artifact import ProgramClass
from octavo.runtime.batch import Batch


class Executor:
    """One device's copy of the program. It keeps no state but the KV cache."""

    def __init__(
        self,
        program: ProgramClass,
        weights: Mapping[str, Tensor],
        kv_caches: list[tuple[Tensor, Tensor]],
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.device = device
        with torch.inference_mode():
            self._step = program(
                weights, kv_caches, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs
            )

    def execute(self, batch: Batch) -> Tensor:
        """Run a step. Logits ``f32[R, vocab]``, valid until the next call."""
        with torch.inference_mode():
            return self._step(*batch.to_tensors(self.device))
