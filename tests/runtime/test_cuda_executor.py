"""The executor of the GPU, run on the CPU: its sizes, padding and places, with graphs that call.

What a graph is here: the function, called again. It reads the same views of the same memory, so a
value that is not at its place in the packed inputs gives other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.runtime import load
from octavo.runtime.artifact import Artifact
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_executor import CudaExecutor
from octavo.runtime.executor import FinishedStep, PendingStep
from octavo.runtime.host_kv_cache import HostKVCache
from octavo.runtime.kv_cache import KVCachePlan, allocate_kv_caches
from octavo.runtime.llm import LLM
from octavo.runtime.sampler import SampleRow, sample
from octavo.runtime.step_inputs import SampleTensors, StepInputs, table_width
from tests.runtime.test_llm import mixed_params, prompts, shown

CPU = torch.device("cpu")


class Columns:
    """The parameters of rows, each with a number that tells it from its neighbours."""

    def __init__(self, rows: Sequence[SampleRow]) -> None:
        self.temperature = np.array([row.params.temperature for row in rows], dtype=np.float32)
        self.top_k = np.array([row.params.top_k for row in rows], dtype=np.int32)
        self.top_p = np.array([row.params.top_p for row in rows], dtype=np.float32)
        self.min_p = np.array([row.params.min_p for row in rows], dtype=np.float32)
        self.seed = np.array([row.seed for row in rows], dtype=np.int64)
        self.stream = np.array([row.stream for row in rows], dtype=np.int64)
        self.position = np.array([row.position for row in rows], dtype=np.int64)


class HostSampler:
    """Samples with PyTorch, after checking that the parameters are where they belong."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def columns(self, rows: Sequence[SampleRow], padded: int) -> Columns:
        return Columns(rows)

    def sample(self, logits: Tensor, sampling: SampleTensors) -> None:
        assert len(logits) == len(sampling.temperature)
        self.tokens[: len(logits)] = logits.argmax(-1)

    def finish(
        self, logits: Tensor, sampling: SampleTensors, rows: Sequence[SampleRow]
    ) -> PendingStep:
        for name, column in vars(Columns(rows)).items():
            packed = getattr(sampling, name).numpy()
            assert packed.dtype == column.dtype
            assert np.array_equal(packed[: len(rows)], column), name
        padding = slice(len(rows), None)
        assert not sampling.temperature[padding].any()
        found = sample(logits[: len(rows)], rows) if rows else []
        self.tokens[: len(rows)] = torch.tensor([token.token_id for token in found])
        return FinishedStep(found)


class CheckedExecutor(CudaExecutor):
    """Remembers the sizes of its steps, and sees to it that padding disturbs nobody."""

    def watch(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        self.caches = caches
        self.batches: list[Batch] = []

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> PendingStep:
        before = [cache.clone() for pair in self.caches for cache in pair]
        pending = super().launch(batch, rows)
        self.batches.append(batch)
        written = set(batch.slot_mapping.flatten().tolist())
        if batch.loads is not None:
            size = before[0].shape[1]
            written.update(block * size + i for block in batch.loads[1] for i in range(size))
        for old, new in zip(before, [c for pair in self.caches for c in pair], strict=True):
            changed = (old != new).flatten(0, 1).flatten(1).any(1).nonzero()[:, 0].tolist()
            null_block = range(new.shape[1])
            assert set(changed) - set(null_block) <= written
        return pending


def with_graphs(llm: LLM, folder: Path, *, graphs: bool) -> CheckedExecutor:
    """Give an LLM the executor of the GPU in place of its own."""
    artifact = Artifact.open(folder)
    blocks, config = llm.engine.scheduler.blocks, llm.engine.scheduler.config
    plan = KVCachePlan(blocks.num_blocks, blocks.block_size, 1)
    caches = allocate_kv_caches(artifact.manifest.kv_slots, plan, artifact.kv_format, CPU)
    tier = blocks.host_tier
    executor = CheckedExecutor(
        artifact.load_program(),
        artifact.load_weights(CPU),
        caches,
        max_num_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        inputs=StepInputs(
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            width=table_width(llm.engine.max_model_len, blocks.block_size),
            num_groups=len(blocks.groups),
            device=CPU,
        ),
        make_sampler=lambda program, tokens: HostSampler(tokens),
        stream=None,
        host_kv_cache=None if tier is None else HostKVCache(caches, tier.num_slots, CPU),
    )
    executor.watch(caches)
    if graphs:
        executor.capture_graphs(lambda run: run)
    llm.engine.executor = executor
    return executor


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("max_num_seqs", [3, 8, 64])
def test_log_probabilities_of_prompts_are_those_of_the_cpu(
    shared_toy: Path, max_num_seqs: int, graphs: bool
) -> None:
    params = mixed_params(6)
    for each in params[::2]:
        each.prompt_logprobs = 2
    expected = LLM(shared_toy).generate(prompts()[:6], params)
    llm = LLM(shared_toy, async_scheduling=True, max_num_seqs=max_num_seqs)
    with_graphs(llm, shared_toy, graphs=graphs)
    found = llm.generate(prompts()[:6], params)
    assert shown(found) == shown(expected)
    assert [o.prompt_logprobs for o in found] == [o.prompt_logprobs for o in expected]
    assert all(output.prompt_logprobs for output in found[::2])


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 5},
        {"long_prefill_token_threshold": 7, "block_size": 4},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3, "block_size": 8},
        {"num_gpu_blocks_override": 20, "block_size": 8},
    ],
    ids=str,
)
def test_the_answers_are_those_of_the_cpu(
    shared_toy: Path, options: dict[str, Any], overlap: bool, graphs: bool
) -> None:
    params = mixed_params(12)
    expected = shown(LLM(shared_toy).generate(prompts(), params))
    llm = LLM(shared_toy, async_scheduling=overlap, **options)
    executor = with_graphs(llm, shared_toy, graphs=graphs)
    assert shown(llm.generate(prompts(), params)) == expected
    sources = [batch.source_rows is not None for batch in executor.batches]
    assert any(sources) == overlap


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_blocks_in_host_memory_change_no_answer(
    shared_toy: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MIN_LOAD_TOKENS", 1)
    params = mixed_params(12)
    expected = shown(LLM(shared_toy).generate(prompts(), params))
    tight: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 8, "max_num_seqs": 4}
    llm = LLM(shared_toy, async_scheduling=True, kv_offload_gb=0.01, **tight)
    with_graphs(llm, shared_toy, graphs=graphs)
    for _ in range(2):
        assert shown(llm.generate(prompts(), params)) == expected
    assert llm.stats().num_loaded_blocks > 0
