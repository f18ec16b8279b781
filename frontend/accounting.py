"""Does the checkpoint fit the model? Every tensor is used once, tied by rule, or explained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from octavo.frontend.weights import QuantizedSource, WeightSource, tied_names
from octavo.ir.errors import OctavoError

# Buffers that older checkpoints stored and that the model computes from its config.
_COMPUTED = {
    r"rotary_emb\.inv_freq$": "rotary frequencies, computed from the config",
    r"(^|\.)attn\.(masked_)?bias$": "causal mask buffer, computed",
    r"(^|\.)attention\.(masked_)?bias$": "causal mask buffer, computed",
    r"(^|\.)position_ids$": "position buffer, computed",
    r"\.[kv]_scale$": "scale of a KV cache, which --kv-scales checkpoint takes",
}


@dataclass(frozen=True)
class Accounting:
    """What became of each tensor: names used as they are, `{alias: stored name}`,"
    f" `{name: reason}`."""

    used: tuple[str, ...]
    tied: dict[str, str]
    explained: dict[str, str]
    num_bytes: int


def account(model: Any, weights: WeightSource) -> Accounting:
    """Match the names and shapes of `weights` against the meta-device `model`'s state dict.

    Only shapes are compared, and whether both are floats or neither is; data is read for one thing,
    a tied pair that is stored twice and has to be equal. Raises OctavoError, one line, naming up to
    three tensors of each kind of trouble: missing, extra, of another shape, integers for floats,
    tied but different.
    """
    state = model.state_dict()
    expected = {key: tuple(value.shape) for key, value in state.items()}
    stored = set(weights.keys())
    tied = _tied(model, stored)
    missing = [key for key in expected if key not in stored and key not in tied]
    extra = sorted(stored - expected.keys())
    explained = _explained(model, missing, extra)
    explained.update(_zero_biases(weights, extra))
    wrong = [
        f"{key}: expected {list(shape)}, got {list(weights.info(key).shape)}"
        for key, shape in expected.items()
        if key in stored and weights.info(key).shape != shape
    ]
    problems = [
        _problem("missing", [key for key in missing if key not in explained]),
        _problem("not of this model", [key for key in extra if key not in explained]),
        _problem("of another shape", wrong),
    ]
    if any(problems):
        raise OctavoError(
            f"the weights do not fit {type(model).__name__}:"
            f" {'; '.join(problem for problem in problems if problem)};"
            " check that config.json and the weights are of the same model"
        )
    _check_floats(state, weights, stored)
    _check_tied_equal(model, weights, stored)
    used = tuple(key for key in expected if key in stored)
    num_bytes = sum(weights.info(key).num_bytes for key in used)
    return Accounting(used, tied, explained, num_bytes)


def _tied(model: Any, stored: set[str]) -> dict[str, str]:
    """Names that are not stored, and the stored name of the same tensor."""
    tied: dict[str, str] = {}
    for alias, owner in tied_names(model).items():
        if alias not in stored and owner in stored:
            tied[alias] = owner
        elif owner not in stored and alias in stored:
            tied[owner] = alias
    return tied


def _explained(model: Any, missing: list[str], extra: list[str]) -> dict[str, str]:
    explained: dict[str, str] = {}
    may_miss = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    may_have = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for key in missing:
        if any(re.search(pattern, key) for pattern in may_miss):
            explained[key] = "computed by the model, by its own list"
    for key in extra:
        reasons = (reason for pattern, reason in _COMPUTED.items() if re.search(pattern, key))
        if reason := next(reasons, None):
            explained[key] = reason
        elif any(re.search(pattern, key) for pattern in may_have):
            explained[key] = "not part of the language model, by the model's own list"
    return explained


def _zero_biases(weights: WeightSource, extra: list[str]) -> dict[str, str]:
    """AutoGPTQ gave every linear a bias, of zeros where the model has none."""
    if not isinstance(weights, QuantizedSource):
        return {}
    biases = [
        key
        for key in extra
        if key.endswith(".bias")
        and (weight := f"{key.removesuffix('bias')}weight") in weights.keys()
        and weights.scheme(weight) is not None
    ]
    reason = "a bias of zeros, which the model does not have"
    return {key: reason for key in biases if not bool(weights.load(key).any())}


def _problem(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _check_floats(state: dict[str, torch.Tensor], weights: WeightSource, stored: set[str]) -> None:
    """Integers for floats are a quantised checkpoint, whose scales we would not know."""
    for key, value in state.items():
        if key not in stored or not value.is_floating_point():
            continue
        dtype = weights.info(key).dtype
        if not dtype.is_floating_point:
            raise OctavoError(
                f"{key} is stored as {str(dtype).removeprefix('torch.')}, expected a float tensor;"
                " config.json has no quantization_config that says how it is quantised"
            )


def _check_tied_equal(model: Any, weights: WeightSource, stored: set[str]) -> None:
    for alias, owner in tied_names(model).items():
        if alias not in stored or owner not in stored:
            continue
        if not torch.equal(weights.load(alias), weights.load(owner)):
            raise OctavoError(
                f"{alias} and {owner} are stored with different values, but the config ties them;"
                " set tie_word_embeddings to false in config.json if they are meant to differ"
            )
