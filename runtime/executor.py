"""Runs steps: binds a program to its weights and caches, and gives the tokens it samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.artifact import ProgramClass
from octavo.runtime.batch import Batch
from octavo.runtime.host_kv_cache import HostKVCache
from octavo.runtime.kv_cache import KVCaches
from octavo.runtime.sampler import SampledToken, SampleRow, sample


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> list[SampledToken]:
        """The tokens of its rows, waited for; the same list when asked again."""
        ...


class StepExecutor(Protocol):
    """What the engine asks of a device.

    ``num_launched_tokens`` are those of the last launch, its padding counted.
    """

    num_launched_tokens: int

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> PendingStep:
        """Start a step and the sampling of its R rows. Steps run in the order of their launches."""
        ...


@dataclass(frozen=True)
class FinishedStep:
    """A step that ran when it was launched."""

    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


class Executor:
    """Runs a step at once, and its sampling with PyTorch. The executor of the CPU."""

    def __init__(
        self,
        program: ProgramClass,
        weights: Mapping[str, Tensor],
        kv_caches: KVCaches,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        device: torch.device,
        host_kv_cache: HostKVCache | None = None,
    ) -> None:
        self.device = device
        self._host_kv_cache = host_kv_cache
        self.num_launched_tokens = 0
        self._sampled = np.empty(0, dtype=np.int64)  # of the last step, for `source_rows`
        with torch.inference_mode():
            self._step = program(
                weights, kv_caches, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs
            )

    def execute(self, batch: Batch) -> Tensor:
        """Run a step. Logits ``f32[R, vocab]``, valid until the next call."""
        with torch.inference_mode():
            if self._host_kv_cache is not None:
                self._host_kv_cache.copy(batch.saves, batch.loads)
            return self._step(*batch.to_tensors(self.device))

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> PendingStep:
        """Run a step and sample its rows."""
        self.num_launched_tokens = len(batch.ids)
        logits = self.execute(with_known_ids(batch, self._sampled))
        tokens = sample(logits, rows) if rows else []
        self._sampled = np.array([token.token_id for token in tokens], dtype=np.int64)
        return FinishedStep(tokens)


def with_known_ids(batch: Batch, sampled: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
    """The batch with the ids that its ``source_rows`` refer to."""
    if batch.source_rows is None:
        return batch
    pending = np.flatnonzero(batch.source_rows >= 0)
    ids = batch.ids.copy()
    ids[pending] = sampled[batch.source_rows[pending]]
    return replace(batch, ids=ids, source_rows=None)
