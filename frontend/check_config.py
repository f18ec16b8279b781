"""Refusing by its config what could not be traced, or would take minutes to say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.frontend.refused import RefusedArchitecture

_COUNTS = ("num_hidden_layers", "vocab_size")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_RECURRENCES = ("linear", "conv", "mamba", "recurrent", "hybrid")
_TRACED_KINDS = {
    *("attention", "full_attention", "sliding_attention", "chunked_attention"),
    *("dense", "sparse"),  # kinds of MLP, where a config lists those
}


def check_config(config: Any) -> None:
    """Raise RefusedArchitecture for a config of a model that cannot be traced."""
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedArchitecture("encoder-decoder models are not supported")
    text = config.get_text_config()
    _check_counts(text)
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        raise RefusedArchitecture("mixture-of-experts models are not supported yet")
    _check_layer_kinds(text)


def _check_counts(text: Any) -> None:
    for name in _COUNTS:
        count = getattr(text, name, None)
        if isinstance(count, int) and count < 1:
            written = (getattr(text, "attribute_map", None) or {}).get(name, name)
            raise RefusedArchitecture(f"{written} is {count}; expected 1 or more")


def _check_layer_kinds(text: Any) -> None:
    """Said at once: tracing the unrolled scan of a recurrence would take minutes."""
    kinds = {str(kind) for name in _LAYER_KINDS for kind in getattr(text, name, None) or ()}
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENCES))
    if recurrent:
        raise RefusedArchitecture(
            f"{', '.join(recurrent)} layers carry a state from token to token, which is not"
            " supported yet"
        )
    if unknown := sorted(kinds - _TRACED_KINDS):
        raise RefusedArchitecture(f"{', '.join(unknown)} layers are not supported yet")


def fields_holding(config: Any, value: str) -> str:
    """Where a config holds a text, as ``rope_parameters.rope_type``; empty when nowhere."""
    return ", ".join(dict.fromkeys(_paths(config.get_text_config().to_dict(), value)))


def _paths(entries: dict[str, Any], value: str) -> Iterator[str]:
    for name, entry in entries.items():
        if isinstance(entry, dict):
            yield from (f"{name}.{path}" for path in _paths(entry, value))
        elif entry == value:
            yield str(name)
