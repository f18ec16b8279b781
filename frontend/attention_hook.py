"""Making attention one opaque node: what transformers calls while a model is traced.

transformers looks attention, masks and experts up by name; ours is ``octavo``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from octavo.frontend.mask_probe import MaskDescription, probe_mask
from octavo.frontend.positions import stated_positions
from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.ops.attention import attention as attention_op

IMPLEMENTATION = "octavo"

# Tensors that models hand on to every attention function, and that say nothing new.
_IGNORED = {"position_ids", "cache_position", "position_embeddings"}


@torch.library.custom_op("octavo::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """The IR's ``attention``: q ``[1, H, T, D]``, k, v ``[1, Hk, T, D]`` to ``[1, T, H, Dv]``."""
    result: Tensor = attention_op.evaluate(
        q, k, v, sinks, scale=scale, causal=causal, window=window, chunk=chunk, softcap=softcap
    )
    return result


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskDescription | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers; emits one ``octavo::attention``."""
    _check_arguments(module, query, key, attention_mask, others)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask = attention_mask
    if isinstance(mask, MaskDescription):
        causal = True
    else:
        mask = MaskDescription(window=sliding_window)
    if not causal:
        raise RefusedArchitecture("attention is not causal: later tokens change earlier ones")
    out = torch.ops.octavo.attention(
        query,
        key,
        value,
        s_aux,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        True,
        mask.window,
        mask.chunk,
        float(softcap) if softcap else None,
    )
    return out, None


def _check_arguments(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, others: dict[str, Any]
) -> None:
    kind = type(module).__name__
    if isinstance(mask, Tensor):
        raise RefusedArchitecture(f"{kind} adds a mask tensor of its own to the attention scores")
    if getattr(module, "is_cross_attention", False) or query.shape[2] != key.shape[2]:
        raise RefusedArchitecture(f"{kind} attends to another sequence than the tokens themselves")
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _IGNORED:
            raise RefusedArchitecture(f"{kind} gives attention a tensor {name!r}, which is unknown")


def _refuse_experts(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    raise RefusedArchitecture("mixture-of-experts models are not supported yet")


@contextmanager
def attention_hooks() -> Iterator[None]:
    """Let transformers find ``octavo`` while a model is built and traced."""

    def describe(*, mask_function: Any, config: Any, **_: Any) -> MaskDescription:
        return probe_mask(mask_function, stated_positions(config))

    find_packed = masking_utils.find_packed_sequence_indices
    transformers.AttentionInterface.register(IMPLEMENTATION, traced_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, describe)
    ExpertsInterface.register(IMPLEMENTATION, _refuse_experts)
    # Positions that jump mean packed sequences to transformers; here they are one sequence's.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        for interface in (
            transformers.AttentionInterface,
            AttentionMaskInterface,
            ExpertsInterface,
        ):
            interface._global_mapping.pop(IMPLEMENTATION, None)
