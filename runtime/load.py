"""From an artifact and options to an engine that runs."""

from __future__ import annotations

import logging
from typing import Any

import torch

from octavo.ir.manifest import Manifest
from octavo.ir.types import DTYPES
from octavo.runtime.artifact import Artifact
from octavo.runtime.artifact_files import is_weight
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.device import device_for
from octavo.runtime.engine import Engine
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.executor import Executor
from octavo.runtime.kv_cache import (
    KVCachePlan,
    allocate_kv_caches,
    default_kv_cache_bytes,
    plan_kv_cache,
)
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.scheduler import SchedulerConfig
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


def load_engine(artifact: Artifact, options: LLMOptions, tokenizer: Tokenizer | None) -> Engine:
    """Plan the memory, import the program and bind it to its weights."""
    manifest = artifact.manifest
    check_compiled_as(artifact, options)
    device = device_for(manifest.target)
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type]
    max_num_tokens = options.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    available = options.kv_cache_memory_bytes
    if available is None:
        weight_bytes = sum(e.size for name, e in manifest.files.items() if is_weight(name))
        available = default_kv_cache_bytes(device, options.gpu_memory_utilization, weight_bytes)
    dtype = artifact.dtype
    wanted_len = _wanted_len(manifest, options)
    plan = plan_kv_cache(
        manifest.kv_slots,
        dtype,
        block_size=options.block_size,
        wanted_tokens=max_num_seqs * (wanted_len + options.block_size),
        available_bytes=available,
        num_blocks=options.num_gpu_blocks_override,
    )
    max_model_len = _fitting_len(plan, wanted_len, options)
    executor = Executor(
        artifact.load_program(),
        artifact.load_weights(device),
        allocate_kv_caches(manifest.kv_slots, plan, dtype, device),
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        device=device,
    )
    return Engine(
        executor,
        BlockManager(plan.num_blocks, plan.block_size),
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
        ),
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(artifact, tokenizer),
        seed=options.seed,
        async_scheduling=bool(options.async_scheduling),
    )


def check_compiled_as(artifact: Artifact, options: LLMOptions) -> None:
    """Refuse a dtype or quantisation that the artifact was not compiled for."""
    dtype = None if options.dtype is None else _dtype_name(DTYPES[options.dtype])
    actual = _dtype_name(artifact.dtype)
    if dtype is not None and dtype != actual:
        raise InvalidRequest(
            f"{artifact.root} was compiled with dtype {actual}, not {dtype}; leave dtype out or "
            f"compile the model again with --dtype {dtype}"
        )
    quantization = artifact.manifest.quantization
    if options.quantization is not None and options.quantization != quantization:
        raise InvalidRequest(
            f"{artifact.root} was compiled with quantization {quantization}, not "
            f"{options.quantization}; leave quantization out: this version quantises no models"
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


def _wanted_len(manifest: Manifest, options: LLMOptions) -> int:
    wanted = options.max_model_len
    if wanted is not None and wanted > manifest.max_position:
        raise InvalidRequest(
            f"max_model_len={wanted} is beyond the model's own maximum of {manifest.max_position}"
        )
    return wanted or manifest.max_position


def _fitting_len(plan: KVCachePlan, wanted_len: int, options: LLMOptions) -> int:
    # The last token of a sequence is never fed back, so its K and V need no room.
    fitting = plan.num_tokens + 1
    if wanted_len <= fitting:
        return wanted_len
    num_blocks = -(-(wanted_len - 1) // plan.block_size)
    more, enough = "kv_cache_memory_bytes", f"{(num_blocks + 1) * plan.block_bytes} bytes"
    if options.num_gpu_blocks_override is not None:
        more, enough = "num_gpu_blocks_override", f"{num_blocks} blocks"
    if options.max_model_len is not None:
        raise CapacityError(
            f"the KV cache holds {plan.num_tokens} tokens, too few for one sequence of "
            f"max_model_len={wanted_len}; lower max_model_len or raise {more} "
            f"({enough} would do)"
        )
    logger.warning(
        "max_model_len is lowered from the model's %d to %d, which is what the KV cache holds; "
        "raise %s for more",
        wanted_len,
        fitting,
        more,
    )
    return fitting
