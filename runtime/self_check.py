"""An artifact carries its proof: Hugging Face's answers to a few prompts, and this check of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from octavo.runtime.artifact import Artifact
from octavo.runtime.batch import Batch
from octavo.runtime.errors import ArtifactError
from octavo.runtime.executor import Executor
from octavo.runtime.kv_cache import allocate_kv_caches

_BLOCK_SIZE = 16


def check_golden(artifact: Artifact) -> float:
    """Run the prompts of tests/golden.json; returns the largest error of a log-probability.

    The prompts share a step. The file holds, for each, the ids, the position of the first one, the
    rows of interest and for each row Hugging Face's best ids with their log-probabilities; and the
    ``tolerance`` that the compiler derived from the dtype. Raises ArtifactError beyond it.
    """
    golden = artifact.model_json("../tests/golden.json")
    cases = golden["cases"]
    num_tokens = sum(len(case["ids"]) for case in cases)
    batch = _batch(cases)
    dtype = getattr(torch, artifact.manifest.dtype)
    executor = Executor(
        artifact.load_program(),
        artifact.load_weights(),
        allocate_kv_caches(
            artifact.manifest.kv_slots, dtype, int(batch.block_table.max()) + 1, _BLOCK_SIZE
        ),
        max_num_tokens=num_tokens,
        max_num_seqs=len(cases),
        device=torch.device("cpu"),
    )
    got = executor.execute(batch).log_softmax(-1)
    top = [row for case in cases for row in case["top"]]
    ids = torch.tensor([[token for token, _ in row] for row in top])
    expected = torch.tensor([[logprob for _, logprob in row] for row in top])
    error = float((got.gather(1, ids) - expected).abs().max())
    if not error <= golden["tolerance"]:
        raise ArtifactError(
            f"{artifact.root}: its log-probabilities differ from Hugging Face's by {error:.3g}, more "
            f"than {golden['tolerance']:.3g}; do not use it, and report the model"
        )
    return error


def _batch(cases: list[dict[str, Any]]) -> Batch:
    """All prompts end to end, each in consecutive blocks of its own from block 1 on."""
    lengths = [len(case["ids"]) for case in cases]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    first_block = np.concatenate(([1], 1 + np.cumsum(blocks)))
    table = np.zeros((len(cases), max(blocks)), dtype=np.int32)
    for row, (first, count) in enumerate(zip(first_block, blocks, strict=False)):
        table[row, :count] = np.arange(first, first + count)
    return Batch(
        ids=np.concatenate([case["ids"] for case in cases]).astype(np.int64),
        positions=np.concatenate(
            [np.arange(n) + case["first_position"] for n, case in zip(lengths, cases, strict=True)]
        ).astype(np.int64),
        slot_mapping=np.concatenate(
            [first * _BLOCK_SIZE + np.arange(n) for first, n in zip(first_block, lengths, strict=False)]
        ).astype(np.int64),
        block_table=table,
        query_start=starts.astype(np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        logit_rows=np.concatenate(
            [start + np.array(case["rows"]) for start, case in zip(starts, cases, strict=False)]
        ).astype(np.int64),
    )
