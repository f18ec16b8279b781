"""Random weights: literal values, so that another machine or version cannot drift unseen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.frontend.random_weights import RandomWeights, bell_curve
from octavo.frontend.source import resolve
from octavo.frontend.weights import TiedWeights, tied_names
from tests.frontend.conftest import tiny_config


def test_values_are_the_same_everywhere() -> None:
    values = bell_curve(7, "model.norm.weight", 1 << 21)
    assert hashlib.sha256(values.tobytes()).hexdigest() == (
        "a78607faed91758ad14a80dfd7f2527042751e6fb12e9b79289e19c274d17201"
    )


def test_a_prefix_does_not_depend_on_the_length() -> None:
    long = bell_curve(0, "x", (1 << 20) + 5)
    assert np.array_equal(bell_curve(0, "x", 123), long[:123])


def test_mean_variance_and_independence() -> None:
    a, b = bell_curve(0, "a", 1 << 18), bell_curve(0, "b", 1 << 18)
    for values in (a, b):
        assert abs(values.mean()) < 0.01
        assert abs(values.var() - 1) < 0.01
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.01
    assert not np.array_equal(a, bell_curve(1, "a", 1 << 18))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "opt", "qwen3_moe"])
def test_a_whole_model_and_its_logits(model_type: str, on_meta: Callable[..., Any]) -> None:
    """Every tensor has its model's shape, ties hold, and the logits depend on the input."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config).eval()
    weights = TiedWeights(RandomWeights(on_meta(config), config, 3), tied_names(model))
    model.load_state_dict({key: weights.load(key) for key in model.state_dict()})
    logits = model(torch.tensor([[5, 6, 7], [8, 6, 7]])).logits
    assert torch.isfinite(logits).all()
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 0.1


def test_order_does_not_matter_and_dtype_is_the_configs(on_meta: Callable[..., Any]) -> None:
    config = tiny_config("llama", dtype="bfloat16")
    first = RandomWeights(on_meta(config), config, 0)
    second = RandomWeights(on_meta(config), config, 0)
    keys = list(first.keys())
    forward = {key: first.load(key) for key in keys}
    for key in reversed(keys):
        loaded = second.load(key)
        assert loaded.dtype == second.info(key).dtype == torch.bfloat16
        assert torch.equal(loaded, forward[key])


def test_a_bare_config_file_is_enough(tmp_path: Any) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        source = resolve(path, random_weights=5)
        assert (source.kind, source.seed) == ("random", 5)
        assert [file.name for file in source.model_files] == ["config.json"]
