"""An artifact carries its proof: Hugging Face's answers to a few prompts, and their check."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ir.manifest import num_groups
from octavo.runtime.artifact import Artifact, read_json_object
from octavo.runtime.batch import Batch
from octavo.runtime.errors import ArtifactError
from octavo.runtime.window_logits import BLOCK_SIZE, plain_executor


def check_golden(artifact: Artifact) -> float:
    """Run the prompts of tests/golden.json; returns the largest error of a log-probability.

    The prompts share one step. The file holds, for each, the ids, the position of the first, and
    the likeliest next ids with their log-probabilities: Hugging Face's or, of a quantised model,
    what the interpreter says of its graph (``reference`` names it). Its ``tolerance`` was derived
    by the compiler from dtype and schemes. Raises ArtifactError beyond it, or without such a file.
    """
    path = artifact.file("tests/golden.json")
    if path is None:
        raise ArtifactError(f"{artifact.root}: the manifest lists no tests/golden.json")
    golden = read_json_object(path)
    logprobs = _run(artifact, golden["cases"]).log_softmax(-1)
    ids = torch.tensor([case["top_ids"] for case in golden["cases"]])
    expected = torch.tensor([case["top_logprobs"] for case in golden["cases"]])
    error = float((logprobs.gather(1, ids) - expected).abs().max())
    if not error <= golden["tolerance"]:
        raise ArtifactError(
            f"{artifact.root}: its log-probabilities differ from those of"
            f" {golden.get('reference', 'Hugging Face')} by {error:.3g}, "
            f"more than {golden['tolerance']:.3g}; do not use it, and report the model"
        )
    return error


def _run(artifact: Artifact, cases: list[dict[str, Any]]) -> Tensor:
    """Logits ``[len(cases), vocab]`` after the last token of each prompt."""
    batch = golden_batch(cases, num_groups(artifact.manifest.kv_slots))
    executor = plain_executor(
        artifact,
        num_blocks=int(batch.block_table.max()) + 1,
        max_num_tokens=len(batch.ids),
        max_num_seqs=len(cases),
    )
    return executor.execute(batch).cpu()


def golden_batch(cases: list[dict[str, Any]], num_groups: int) -> Batch:
    """All prompts end to end, each in consecutive blocks of its own from block 1 on; the blocks of
    a block group follow those of the one before."""
    lengths = [len(case["ids"]) for case in cases]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    first_block = np.concatenate(([1], 1 + np.cumsum(blocks)))
    table = np.zeros((len(cases), max(blocks)), dtype=np.int32)
    for row, (first, count) in enumerate(zip(first_block, blocks, strict=False)):
        table[row, :count] = np.arange(first, first + count)
    slots = np.concatenate(
        [first * BLOCK_SIZE + np.arange(n) for first, n in zip(first_block, lengths, strict=False)]
    )
    if num_groups > 1:
        shifts = np.arange(num_groups) * sum(blocks)
        table = np.where(table > 0, table + shifts[:, None, None], 0)
        slots = slots + shifts[:, None] * BLOCK_SIZE
    return Batch(
        ids=np.concatenate([case["ids"] for case in cases]).astype(np.int64),
        positions=np.concatenate(
            [np.arange(n) + case["first_position"] for n, case in zip(lengths, cases, strict=True)]
        ).astype(np.int64),
        slot_mapping=slots.astype(np.int64),
        block_table=table.astype(np.int32),
        query_start=starts.astype(np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        logit_rows=starts[1:].astype(np.int64) - 1,
    )
