"""The logits of every token of a sequence, by the program of an artifact itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.ir.manifest import num_groups
from octavo.runtime.artifact import Artifact
from octavo.runtime.batch import Batch
from octavo.runtime.device import device_for
from octavo.runtime.executor import Executor
from octavo.runtime.kv_cache import KVCachePlan, allocate_kv_caches, block_bytes
from octavo.runtime.program_loader import import_program

BLOCK_SIZE = 16
# A step's logits are all held at once: of a vocabulary of 128 Ki these are 128 MiB.
_STEP_TOKENS = 256


def plain_executor(
    artifact: Artifact, *, num_blocks: int, max_num_tokens: int, max_num_seqs: int
) -> Executor:
    """A program bound to its weights and to caches of so many blocks, run step by step."""
    slots, device = artifact.manifest.kv_slots, device_for(artifact.manifest.target)
    plan = KVCachePlan(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes(slots, artifact.kv_format, BLOCK_SIZE),
    )
    if device.type == "cuda":
        # Here and not above: a machine without a GPU needs no Triton.
        from octavo.runtime.binaries import bind_kernels

        module = import_program(artifact.root, artifact.manifest)
        bind_kernels(artifact, module, device, block_size=BLOCK_SIZE)
    return Executor(
        artifact.load_program(),
        artifact.load_weights(device),
        allocate_kv_caches(slots, plan, artifact.kv_format, device),
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        device=device,
    )


class WindowLogits:
    """Runs sequences of up to ``max_tokens`` tokens, one at a time, as prefills in chunks."""

    def __init__(self, artifact: Artifact, max_tokens: int) -> None:
        groups, count = num_groups(artifact.manifest.kv_slots), -(-max_tokens // BLOCK_SIZE)
        tables = np.arange(1, 1 + groups * count, dtype=np.int32).reshape(groups, 1, count)
        self._tables = tables if groups > 1 else tables[0]
        self._executor = plain_executor(
            artifact,
            num_blocks=self._tables.size + 1,
            max_num_tokens=min(max_tokens, _STEP_TOKENS),
            max_num_seqs=1,
        )

    def logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Logits ``f32[rows, vocab]`` of all tokens in order, on the CPU, a chunk at a time."""
        # Copied: the next step writes its logits to the same memory.
        for start in range(0, len(ids), _STEP_TOKENS):
            chunk = np.array(ids[start : start + _STEP_TOKENS], dtype=np.int64)
            yield self._executor.execute(self._batch(chunk, start)).to(
                "cpu", torch.float32, copy=True
            )

    def _batch(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]], start: int) -> Batch:
        positions = np.arange(start, start + len(ids), dtype=np.int64)
        blocks = self._tables[..., 0, positions // BLOCK_SIZE].astype(np.int64)
        return Batch(
            ids=ids,
            positions=positions,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_table=self._tables,
            query_start=np.array([0, len(ids)], dtype=np.int32),
            seq_lens=np.array([start + len(ids)], dtype=np.int32),
            logit_rows=np.arange(len(ids), dtype=np.int64),
        )
