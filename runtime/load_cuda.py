"""From an artifact to an executor on an NVIDIA GPU, within a memory plan."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Any

import torch

from octavo.ir.manifest import num_groups
from octavo.runtime.artifact import Artifact, ProgramClass
from octavo.runtime.binaries import bind_kernels
from octavo.runtime.capacity import Capacity, plan_capacity, wanted_len
from octavo.runtime.cuda_executor import CudaExecutor
from octavo.runtime.cuda_graphs import BYTES_PER_GRAPH, GraphSizes
from octavo.runtime.device_sampler import make_sampler
from octavo.runtime.device_weights import StoredWeight, load_weights, packed_bytes, stored_weights
from octavo.runtime.errors import ArtifactError, InvalidRequest
from octavo.runtime.host_kv_cache import HostKVCache, staging_bytes
from octavo.runtime.kv_cache import allocate_kv_caches
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.memory_plan import (
    MemoryPlan,
    MemoryUse,
    does_not_fit,
    fits_or_says_why,
    plan_memory,
)
from octavo.runtime.program_loader import import_program
from octavo.runtime.scheduler import SchedulerConfig
from octavo.runtime.step_inputs import StepInputs, input_bytes, table_width
from octavo.runtime.timings import Timings

logger = logging.getLogger(__name__)


def load_executor(
    artifact: Artifact,
    options: LLMOptions,
    config: SchedulerConfig,
    device: torch.device,
    timings: Timings,
) -> tuple[CudaExecutor, Capacity]:
    """Bind the kernels, plan the memory, fill it, and capture the graphs.

    Raises InvalidRequest, ArtifactError, or CapacityError with the plan.
    """
    _check_block_size(options.block_size)
    _check_converts(artifact, device)
    with timings.phase("kernels"):
        module = import_program(artifact.root, artifact.manifest)
        is_pinned = options.artifact_id is not None
        kernels = bind_kernels(
            artifact, module, device, block_size=options.block_size, is_pinned=is_pinned
        )
        program = artifact.load_program()
    weights = stored_weights(artifact)
    plan, capacity = _plan(artifact, program, weights, options, config, device)
    logger.info("GPU memory:\n%s", plan)
    with fits_or_says_why(plan):
        with timings.phase("weights"):
            tensors = load_weights(weights, device, dummy=options.load_format == "dummy")
        with timings.phase("KV cache"):
            executor = _bind(artifact, program, tensors, capacity, config, device)
        if not options.enforce_eager:
            with timings.phase("graphs"):
                report = executor.capture_graphs(used_bytes=lambda: _used_bytes(device))
            logger.info("%s", report)
    # What is there now stays for good: without this, collections in the middle of steps look at it
    # all, and a step of a small model takes half as long again.
    gc.collect()
    gc.freeze()
    executor.kernels = kernels
    executor.memory = MemoryUse(plan, _used_bytes(device) - plan.in_use)
    logger.info("%s", executor.memory)
    return executor, capacity


def _check_block_size(block_size: int) -> None:
    if block_size & (block_size - 1):
        raise InvalidRequest(f"block_size={block_size}: on a GPU it must be a power of two; try 16")


def _check_converts(artifact: Artifact, device: torch.device) -> None:
    if artifact.kv_cache_dtype != "fp8":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ArtifactError(
            f"{artifact.root} has an FP8 KV cache, which needs a GPU of sm_89 or later; this one "
            f"is sm_{major}{minor}; compile the model again with --kv-cache-dtype int8"
        )


def _plan(
    artifact: Artifact,
    program: ProgramClass,
    weights: dict[str, StoredWeight],
    options: LLMOptions,
    config: SchedulerConfig,
    device: torch.device,
) -> tuple[MemoryPlan, Capacity]:
    """Everything but the KV cache, then that from what is left."""
    max_num_tokens, max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    num_graphs = 0
    if not options.enforce_eager:
        num_graphs = len(GraphSizes(max_num_tokens, max_num_seqs).all)
    manifest = artifact.manifest
    # Not in the protocol of a program, since one for the CPU need not have it.
    sized: Any = program
    plan = plan_memory(
        *torch.cuda.mem_get_info(device),
        options.gpu_memory_utilization,
        weights=packed_bytes(weights),
        program=sized.planned_bytes(max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs),
        inputs=input_bytes(
            max_num_tokens,
            max_num_seqs,
            table_width(wanted_len(manifest, options), options.block_size),
            num_groups(manifest.kv_slots),
        ),
        staging=staging_bytes(manifest.kv_slots, artifact.kv_format, options.block_size)
        if options.kv_offload_gb
        else 0,
        graphs=num_graphs * BYTES_PER_GRAPH,
    )
    available = options.kv_cache_memory_bytes
    if available is None:
        if plan.kv_cache_room <= 0 and options.num_gpu_blocks_override is None:
            raise does_not_fit(plan)
        available = max(0, plan.kv_cache_room)
    capacity = plan_capacity(artifact, options, config, available_bytes=available)
    kv_cache = capacity.kv_cache
    pinned = capacity.num_host_slots * kv_cache.block_bytes
    return replace(plan, kv_cache=kv_cache.total_bytes, pinned=pinned), capacity


def _bind(
    artifact: Artifact,
    program: ProgramClass,
    weights: dict[str, torch.Tensor],
    capacity: Capacity,
    config: SchedulerConfig,
    device: torch.device,
) -> CudaExecutor:
    kv_cache = capacity.kv_cache
    max_num_tokens, max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    caches = allocate_kv_caches(artifact.manifest.kv_slots, kv_cache, artifact.kv_format, device)
    num_slots = capacity.num_host_slots
    inputs = StepInputs(
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        width=table_width(capacity.max_model_len, kv_cache.block_size),
        num_groups=len(capacity.groups),
        device=device,
    )
    torch.cuda.synchronize(device)  # the executor's stream does not wait for the default one
    return CudaExecutor(
        program,
        weights,
        caches,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        inputs=inputs,
        make_sampler=make_sampler,
        stream=torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        host_kv_cache=HostKVCache(caches, num_slots, device) if num_slots else None,
    )


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
