"""The load for a GPU, with the toy program on the CPU in its place: plan, capacity, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.runtime import load_cuda
from octavo.runtime.artifact import Artifact
from octavo.runtime.capacity import Capacity
from octavo.runtime.cuda_executor import CudaExecutor
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.memory_plan import RESERVE_BYTES
from octavo.runtime.scheduler import SchedulerConfig
from octavo.runtime.timings import Timings
from tests.runtime.test_cuda_executor import HostSampler
from tests.runtime.toy_artifact import PROGRAM, write_toy_artifact

CPU = torch.device("cpu")
GIB = 2**30
PROGRAM_BYTES = 100 * 2**20
PLANNED = f"""
    @staticmethod
    def planned_bytes(*, max_num_tokens, max_num_seqs):
        return {PROGRAM_BYTES}

    def row(self,"""

Load = Callable[..., tuple[CudaExecutor, Capacity, Timings]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the toy for a GPU that has ``total`` bytes, ``used`` of them by others."""
    write_toy_artifact(tmp_path / "a", program=PROGRAM.replace("\n    def row(self,", PLANNED))
    artifact = Artifact.open(tmp_path / "a")
    monkeypatch.setattr(load_cuda, "bind_kernels", lambda *args, **options: None)
    monkeypatch.setattr(load_cuda, "make_sampler", lambda program, tokens: HostSampler(tokens))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    def run(total: int = 2 * GIB, used: int = GIB // 2, **options: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
        timings = Timings()
        chosen = LLMOptions(**{"enforce_eager": True, **options})
        config = SchedulerConfig(chosen.max_num_seqs or 8, 256)
        return *load_cuda.load_executor(artifact, chosen, config, CPU, timings), timings

    return run


def test_the_cache_takes_what_is_left_at_most_what_can_be_filled(load: Load) -> None:
    executor, capacity, timings = load()
    assert executor.memory is not None
    plan = executor.memory.plan
    assert (plan.in_use, plan.left) == (GIB // 2, pytest.approx(GIB / 5, abs=1))
    assert (plan.program, plan.reserve, plan.graphs) == (PROGRAM_BYTES, RESERVE_BYTES, 0)
    assert capacity.kv_cache.num_blocks == 8 * (512 + 16) // 16 + 1
    assert plan.kv_cache == capacity.kv_cache.total_bytes
    assert executor.captured is None
    assert list(timings.seconds) == ["kernels", "weights", "KV cache"]


def test_host_memory_is_planned_beside_the_gpus(load: Load) -> None:
    executor, capacity, _ = load(kv_offload_gb=0.01)
    plain, _, _ = load()
    assert executor.memory is not None
    assert plain.memory is not None
    plan, block_bytes = executor.memory.plan, capacity.kv_cache.block_bytes
    assert capacity.num_host_slots == int(0.01 * GIB) // block_bytes > 0
    assert plan.pinned == capacity.num_host_slots * block_bytes
    # Of the toy's one layer, V has three numbers a token and K two.
    assert plan.staging == plan.fixed - plain.memory.plan.fixed == 256 * block_bytes * 3 // 5
    assert "pinned host memory" in str(plan)
    assert "pinned" not in str(plain.memory.plan)


def test_a_small_gpu_has_a_small_cache(load: Load) -> None:
    fixed = PROGRAM_BYTES + RESERVE_BYTES + GIB // 10
    executor, capacity, _ = load(total=GIB, used=GIB - fixed - 2**16, gpu_memory_utilization=0.9)
    assert executor.memory is not None
    plan = executor.memory.plan
    assert 0 <= plan.kv_cache_room - plan.kv_cache < 2 * capacity.kv_cache.block_bytes
    assert capacity.kv_cache.num_blocks > 2


def test_what_does_not_fit_is_refused_with_the_plan(load: Load) -> None:
    with pytest.raises(CapacityError, match=r"(?s)does not fit .*program buffers +0.10 GiB"):
        load(total=GIB, used=GIB // 2)


def test_an_allocation_that_fails_is_refused_with_the_plan(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load_cuda, "allocate_kv_caches", no_memory)
    with pytest.raises(CapacityError, match=r"(?s)KV cache .*lower max_num_batched_tokens"):
        load(num_gpu_blocks_override=50)


def test_a_block_size_of_a_gpu_is_a_power_of_two(load: Load) -> None:
    with pytest.raises(InvalidRequest, match=r"block_size=24: .* power of two"):
        load(block_size=24)
    assert load(block_size=32)[1].kv_cache.block_size == 32
