"""How many positions a model is right for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.frontend.refused import RefusedArchitecture

_NAMES = ("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx", "seq_length")
# Masks are read at every position, which takes some 50 bytes for each while tracing.
MAX_POSITIONS = 1 << 24


def stated_positions(config: Any) -> int:
    """The number of positions that a config states. Raises RefusedArchitecture."""
    text = config.get_text_config()
    name = next((name for name in _NAMES if getattr(text, name, None)), None)
    stated = getattr(text, name) if name is not None else None
    if not isinstance(stated, int):
        raise RefusedArchitecture("its config states no maximum position")
    if not 0 < stated <= MAX_POSITIONS:
        raise RefusedArchitecture(
            f"{name} is {stated}; expected 1 to {MAX_POSITIONS}, the longest context supported"
        )
    return stated


@dataclass(frozen=True)
class PositionBound:
    """The number of positions that a model is right for, and why when it is less than it says."""

    max_position: int
    notice: str | None = None


def bound_positions(model: Any) -> PositionBound:
    """Find the model's maximum position; freeze rotary tables that would change with the length.

    Dynamic NTK and longrope switch frequencies for a whole sequence once it is longer than the
    original context, cached keys included. Up to that length they are plain rotary embeddings.
    """
    stated = stated_positions(model.config)
    limit, switching = stated, set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                switching.add(kind)
                limit = min(limit, _switch_length(module, layer_type, kind, stated))
                _freeze(module, layer_type)
    if limit == stated:
        return PositionBound(stated)
    notice = (
        f"positions are limited to {limit} of {stated}: beyond, {', '.join(sorted(switching))} rope"
        " changes the frequencies of the whole sequence, which a KV cache cannot follow"
    )
    return PositionBound(limit, notice)


def _switch_length(module: Any, layer_type: str | None, kind: str, stated: int) -> int:
    if kind != "longrope":
        return int(getattr(module, "original_max_seq_len", stated))
    parameters = module.config.rope_parameters
    parameters = parameters[layer_type] if layer_type is not None else parameters
    return int(parameters["original_max_position_embeddings"])


def _freeze(module: Any, layer_type: str | None) -> None:
    """Keep the frequencies of the original context: a name that no update rule knows."""
    if layer_type is None:
        module.rope_type = "frozen"
    else:
        module.rope_type = {**module.rope_type, layer_type: "frozen"}
