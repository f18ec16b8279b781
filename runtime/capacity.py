"""How many tokens fit: the size of the KV cache, and the longest sequence that it allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.ir.manifest import Manifest
from octavo.runtime.artifact import Artifact
from octavo.runtime.block_groups import (
    BlockGroup,
    block_groups,
    longest_sequence,
    most_blocks,
)
from octavo.runtime.errors import CapacityError, InvalidRequest
from octavo.runtime.host_kv_cache import plan_host_slots
from octavo.runtime.kv_cache import KVCachePlan, plan_kv_cache
from octavo.runtime.llm_options import LLMOptions
from octavo.runtime.scheduler import SchedulerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """The KV cache and its block groups, the tokens of the longest sequence, and the blocks that
    host memory holds."""

    kv_cache: KVCachePlan
    groups: tuple[BlockGroup, ...]
    max_model_len: int
    num_host_slots: int = 0


def plan_capacity(
    artifact: Artifact, options: LLMOptions, config: SchedulerConfig, *, available_bytes: int
) -> Capacity:
    """Plan a pool within ``available_bytes``, no larger than all sequences can ever fill.

    Raises CapacityError when the length that was asked for does not fit.
    """
    longest, block_size = wanted_len(artifact.manifest, options), options.block_size
    groups = block_groups(artifact.manifest.kv_slots)
    step_tokens = config.max_chunk_tokens
    of_one = most_blocks(groups, longest + block_size, step_tokens, block_size)
    plan = plan_kv_cache(
        artifact.manifest.kv_slots,
        artifact.kv_format,
        block_size=block_size,
        wanted_tokens=config.max_num_seqs * of_one * block_size,
        available_bytes=available_bytes,
        num_blocks=options.num_gpu_blocks_override,
    )
    num_host_slots = plan_host_slots(options, plan)
    fitting = _fitting_len(plan, groups, longest, step_tokens, options)
    return Capacity(plan, groups, fitting, num_host_slots)


def wanted_len(manifest: Manifest, options: LLMOptions) -> int:
    """The length that was asked for, else the model's own. Raises InvalidRequest beyond it."""
    wanted = options.max_model_len
    if wanted is not None and wanted > manifest.max_position:
        raise InvalidRequest(
            f"max_model_len={wanted} is beyond the model's own maximum of {manifest.max_position}"
        )
    return wanted or manifest.max_position


def _fitting_len(
    plan: KVCachePlan,
    groups: Sequence[BlockGroup],
    wanted_len: int,
    step_tokens: int,
    options: LLMOptions,
) -> int:
    # The last token of a sequence is never fed back, so its K and V need no room.
    size, num_usable, longest = plan.block_size, plan.num_blocks - 1, wanted_len - 1
    held = longest_sequence(groups, num_usable, step_tokens, size, longest)
    if held == longest:
        return wanted_len
    fitting = held + 1
    num_blocks = most_blocks(groups, longest, step_tokens, size)
    more, enough = "kv_cache_memory_bytes", f"{(num_blocks + 1) * plan.block_bytes} bytes"
    if options.num_gpu_blocks_override is not None:
        more, enough = "num_gpu_blocks_override", f"{num_blocks} blocks"
    if options.max_model_len is not None:
        raise CapacityError(
            f"the KV cache holds {held} tokens, too few for one sequence of "
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
