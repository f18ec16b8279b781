"""How many tokens fit: the size of the KV cache, and the longest sequence that it allows."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from octavo.ir.manifest import Manifest
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.host_kv_cache import plan_host_slots
from octavo.runtime.kv_cache import KVCachePlan, plan_kv_cache
from octavo.runtime.llm_options import LLMOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """The KV cache, the tokens of the longest sequence, and the blocks that host memory holds."""

    kv_cache: KVCachePlan
    max_model_len: int
    num_host_slots: int = 0


def plan_capacity(
    artifact: Artifact, options: LLMOptions, *, max_num_seqs: int, available_bytes: int
) -> Capacity:
    """Plan a pool within ``available_bytes``, no larger than all sequences can ever fill.

    Raises CapacityError when the length that was asked for does not fit.
    """
    longest = wanted_len(artifact.manifest, options)
    plan = plan_kv_cache(
        artifact.manifest.kv_slots,
        artifact.kv_format,
        block_size=options.block_size,
        wanted_tokens=max_num_seqs * (longest + options.block_size),
        available_bytes=available_bytes,
        num_blocks=options.num_gpu_blocks_override,
    )
    num_host_slots = plan_host_slots(options, plan)
    return Capacity(plan, _fitting_len(plan, longest, options), num_host_slots)


def wanted_len(manifest: Manifest, options: LLMOptions) -> int:
    """The length that was asked for, else the model's own. Raises InvalidRequest beyond it."""
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
