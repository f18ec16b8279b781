"""From an artifact and options to an engine that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.ir.types import DTYPES
from octavo.runtime.artifact import Artifact
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.caching_engine import CachingEngine
from octavo.runtime.capacity import Capacity, plan_capacity
from octavo.runtime.device import device_for
from octavo.runtime.device_weights import load_weights, stored_weights
from octavo.runtime.engine import Engine
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.executor import Executor, StepExecutor
from octavo.runtime.host_kv_cache import MIN_LOAD_TOKENS, HostKVCache
from octavo.runtime.host_tier import HostTier
from octavo.runtime.kv_cache import allocate_kv_caches, cpu_kv_cache_bytes
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.scheduler import SchedulerConfig
from octavo.runtime.timings import Timings
from octavo.runtime.tokenizer import Tokenizer

DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 512}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


def load_engine(
    artifact: Artifact,
    options: LLMOptions,
    tokenizer: Tokenizer | None,
    timings: Timings | None = None,
) -> Engine:
    """Plan the memory, import the program and bind it to its weights.

    Raises ArtifactError, InvalidRequest, or CapacityError. ``timings`` is told the phases.
    """
    timings = timings or Timings()
    check_compiled_as(artifact, options)
    device = device_for(artifact.manifest.target)
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type],
        max_num_batched_tokens=options.max_num_batched_tokens
        or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type],
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        policy=options.scheduling_policy,
        ageing_seconds=options.ageing_ms / 1e3,
    )
    is_cuda = device.type == "cuda"
    executor: StepExecutor
    if is_cuda:
        # Needs Triton, which a CPU has no use for.
        from octavo.runtime.load_cuda import load_executor

        executor, capacity = load_executor(artifact, options, config, device, timings)
    else:
        executor, capacity = _load_executor(artifact, options, config, device, timings)
    num_slots = capacity.num_host_slots
    is_async = options.async_scheduling
    size = options.result_cache_size
    engine_class = partial(CachingEngine, result_cache_size=size) if size else Engine
    return engine_class(
        executor,
        BlockManager(
            capacity.kv_cache.num_blocks,
            capacity.kv_cache.block_size,
            groups=capacity.groups,
            enable_prefix_caching=options.enable_prefix_caching,
            host_tier=HostTier(num_slots, MIN_LOAD_TOKENS) if num_slots else None,
        ),
        config,
        max_model_len=capacity.max_model_len,
        vocab_size=artifact.manifest.vocab_size,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(artifact, tokenizer),
        seed=options.seed,
        async_scheduling=is_cuda if is_async is None else is_async,
        content_id=artifact.manifest.artifact_id,
        check_invariants=options.check_invariants,
    )


def _load_executor(
    artifact: Artifact,
    options: LLMOptions,
    config: SchedulerConfig,
    device: torch.device,
    timings: Timings,
) -> tuple[Executor, Capacity]:
    """The executor of the CPU."""
    available = options.kv_cache_memory_bytes
    capacity = plan_capacity(
        artifact,
        options,
        config,
        available_bytes=cpu_kv_cache_bytes() if available is None else available,
    )
    with timings.phase("kernels"):
        program = artifact.load_program()
    with timings.phase("weights"):
        weights = (
            load_weights(stored_weights(artifact), device, dummy=True)
            if options.load_format == "dummy"
            else artifact.load_weights(device)
        )
    with timings.phase("KV cache"):
        caches = allocate_kv_caches(
            artifact.manifest.kv_slots, capacity.kv_cache, artifact.kv_format, device
        )
        num_slots = capacity.num_host_slots
        host_kv_cache = HostKVCache(caches, num_slots, device) if num_slots else None
        with _buffers_of(config):
            executor = Executor(
                program,
                weights,
                caches,
                max_num_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                device=device,
                host_kv_cache=host_kv_cache,
            )
    return executor, capacity


@contextmanager
def _buffers_of(config: SchedulerConfig) -> Iterator[None]:
    """Say which options the memory of a step's buffers follows from when there is not enough."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # PyTorch has no class of its own for this on a CPU.
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise CapacityError(
            f"no memory for the buffers of a step of max_num_seqs={config.max_num_seqs} and "
            f"max_num_batched_tokens={config.max_num_batched_tokens}; lower one of them"
        ) from error


def check_compiled_as(artifact: Artifact, options: LLMOptions) -> None:
    """Refuse a dtype or quantisation that the artifact was not compiled for."""
    _check_kv_cache(artifact, options)
    dtype = None if options.dtype is None else _dtype_name(DTYPES[options.dtype])
    actual = _dtype_name(artifact.dtype)
    if dtype is not None and dtype != actual:
        raise InvalidRequest(
            f"{artifact.root} was compiled with dtype {actual}, not {dtype}; leave dtype out or "
            f"compile the model again with --dtype {dtype}"
        )
    asked, recipe = options.quantization, artifact.manifest.quantization
    if asked is not None and not _is_recipe(asked, recipe or "none"):
        raise InvalidRequest(
            f"{artifact.root} was compiled with quantization {recipe}, not {asked}; leave "
            f"quantization out or compile the model again with --quant {asked}"
        )


def _is_recipe(asked: str, recipe: str) -> bool:
    """Whether this is what ``--quant`` was given: a recipe in a file goes by the file's stem, and
    ``--quant-head`` adds ``, head ...`` to the name."""
    path = Path(asked)
    name = path.stem if path.suffix in (".yaml", ".yml") else asked
    return name in (recipe, recipe.partition(", head ")[0])


def _check_kv_cache(artifact: Artifact, options: LLMOptions) -> None:
    wanted, actual = options.kv_cache_dtype, artifact.kv_cache_dtype
    if wanted is not None and wanted != actual:
        held = "of the model's dtype" if actual is None else actual
        raise InvalidRequest(
            f"{artifact.root} was compiled with a KV cache that is {held}, not {wanted}; leave "
            f"kv_cache_dtype out or compile the model again with --kv-cache-dtype {wanted}"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def eos_token_ids(artifact: Artifact, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a text: generation_config.json says, else config.json, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        found: Any = artifact.model_json(name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            return frozenset(i for i in ids if type(i) is int)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset((tokenizer.eos_token_id,))
    return frozenset()
