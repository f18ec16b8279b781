"""The streamed Hugging Face model gives what the whole one gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_zoo import tiny_model
from state_dict_weights import StateDictWeights
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from octavo.frontend.cached_weights import CachedWeights
from octavo.frontend.reference import Prompt, eager_logits, eager_model
from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.errors import OctavoError

PROMPTS: list[Prompt] = [([7], 0), ([5, 6, 200, 3, 90], 0), (list(range(30, 50)), 17)]


@torch.no_grad()
def whole(model: Any, ids: list[int], first: int) -> Tensor:
    logits: Tensor = model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.arange(first, first + len(ids))[None],
        attention_mask=torch.ones(1, len(ids)),
        use_cache=False,
    ).logits
    return logits[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3_text", "gpt2", "opt", "cohere"])
def test_streamed_logits_are_exact(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    results = eager_logits(model.config, dtype, StateDictWeights(model), PROMPTS)
    for prompt, logits in zip(PROMPTS, results, strict=True):
        assert torch.equal(logits, whole(model, *prompt))


def test_weights_are_loaded_once_when_they_fit_and_each_time_when_they_do_not() -> None:
    model = tiny_model("llama")
    weights = StateDictWeights(model)
    eager_logits(model.config, torch.float32, weights, PROMPTS)
    assert weights.num_loads == len(weights.keys())
    crowded = StateDictWeights(model)
    eager_logits(
        model.config, torch.float32, CachedWeights(crowded, torch.float32, limit_bytes=0), PROMPTS
    )
    assert crowded.num_loads == len(PROMPTS) * len(crowded.keys())


def test_a_module_that_reads_anothers_weight_is_not_given_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        gate = F.linear(x, self.gate_proj.weight)  # no forward of gate_proj, so no hook of it
        result: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return result

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = tiny_model("llama")
    results = eager_logits(model.config, torch.float32, StateDictWeights(model), PROMPTS)
    for prompt, logits in zip(PROMPTS, results, strict=True):
        assert torch.equal(logits, whole(model, *prompt))


def test_a_config_that_its_own_model_cannot_run_is_refused() -> None:
    model = tiny_model("llama")
    model.config.num_key_value_heads = 3  # of 4 heads: they cannot be shared out
    weights = StateDictWeights(AutoModelForCausalLM.from_config(model.config))
    with pytest.raises(RefusedArchitecture, match="own model cannot run with this config: Run"):
        eager_logits(model.config, torch.float32, weights, PROMPTS)


class _TooLarge(StateDictWeights):
    def load(self, key: str) -> Tensor:
        np.empty(1 << 60, np.uint8)
        raise AssertionError("that fitted")


class _TooLargeForTorch(StateDictWeights):
    def load(self, key: str) -> Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("source", [_TooLarge, _TooLargeForTorch])
def test_a_weight_that_memory_cannot_hold_is_named(source: type[StateDictWeights]) -> None:
    model = tiny_model("llama")
    reason = r"not enough memory for model.embed_tokens.weight: \[256, 64\] takes 0.0 GiB in float"
    with pytest.raises(OctavoError, match=reason):
        eager_logits(model.config, torch.float32, source(model), PROMPTS)


def test_whole_model_generates_like_the_original() -> None:
    model = tiny_model("qwen2")
    copy = eager_model(model.config, torch.float32, StateDictWeights(model))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([[9, 8, 7]])
    assert torch.equal(copy.generate(ids, **options), model.generate(ids, **options))
