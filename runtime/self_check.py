"""An artifact carries its proof: Hugging Face's answers to a few prompts, and their check."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.artifact import Artifact, read_json_object
from octavo.runtime.batch import Batch
from octavo.runtime.device import device_for
from octavo.runtime.errors import ArtifactError
from octavo.runtime.executor import Executor
from octavo.runtime.kv_cache import KVCachePlan, allocate_kv_caches, block_bytes
from octavo.runtime.program_loader import import_program

_BLOCK_SIZE = 16


def check_golden(artifact: Artifact) -> float:
    """Run the prompts of tests/golden.json; returns the largest error of a log-probability.

    The prompts share one step. The file holds, for each, the ids, the position of the first, and
    Hugging Face's likeliest next ids with their log-probabilities; and the ``tolerance`` that the
    compiler derived from the dtype. Raises ArtifactError beyond it, or without such a file.
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
            f"{artifact.root}: its log-probabilities differ from Hugging Face's by {error:.3g}, "
            f"more than {golden['tolerance']:.3g}; do not use it, and report the model"
        )
    return error


def _run(artifact: Artifact, cases: list[dict[str, Any]]) -> Tensor:
    """Logits ``[len(cases), vocab]`` after the last token of each prompt."""
    batch = _batch(cases)
    slots, device = artifact.manifest.kv_slots, device_for(artifact.manifest.target)
    plan = KVCachePlan(
        num_blocks=int(batch.block_table.max()) + 1,
        block_size=_BLOCK_SIZE,
        block_bytes=block_bytes(slots, artifact.kv_format, _BLOCK_SIZE),
    )
    if device.type == "cuda":
        # Here and not above: a machine without a GPU needs no Triton.
        from octavo.runtime.binaries import bind_kernels

        module = import_program(artifact.root, artifact.manifest)
        bind_kernels(artifact, module, device, block_size=_BLOCK_SIZE)
    executor = Executor(
        artifact.load_program(),
        artifact.load_weights(device),
        allocate_kv_caches(slots, plan, artifact.kv_format, device),
        max_num_tokens=len(batch.ids),
        max_num_seqs=len(cases),
        device=device,
    )
    return executor.execute(batch).cpu()


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
            [
                first * _BLOCK_SIZE + np.arange(n)
                for first, n in zip(first_block, lengths, strict=False)
            ]
        ).astype(np.int64),
        block_table=table,
        query_start=starts.astype(np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        logit_rows=starts[1:].astype(np.int64) - 1,
    )
