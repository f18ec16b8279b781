"""Traced models compute what Hugging Face computes, at other lengths and positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import MORE, TINY, tiny_model
from state_dict_weights import StateDictWeights
from torch import Tensor

from octavo.frontend.trace import Imported, import_model
from octavo.ir.interpret import interpret
from octavo.ir.verify import verify

# Length and first position; no model is traced at 5 or 27 tokens, and 27 overruns the window.
PROMPTS = [(1, 0), (5, 0), (27, 0), (27, 20)]


def prompt(length: int, first: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(length))
    return ids, torch.arange(first, first + length)[None]


@torch.no_grad()
def hugging_face(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    logits: Tensor = model(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
    ).logits
    return logits.float()


def traced(imported: Imported, model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    inputs = {"ids": ids, "positions": positions}
    (logits,) = interpret(imported.graph, inputs, StateDictWeights(model))
    assert isinstance(logits, Tensor)
    return logits.float()


@pytest.mark.parametrize("name", [*TINY, *MORE])
def test_float32_graph_gives_the_logits_of_hugging_face(name: str) -> None:
    model = tiny_model(name)
    imported = import_model(model.config, torch.float32)
    verify(imported.graph)
    for length, first in PROMPTS:
        ids, positions = prompt(length, first)
        expected = hugging_face(model, ids, positions)
        got = traced(imported, model, ids, positions)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert expected.argmax(-1).unique().numel() > 9, "the model says the same whatever it reads"


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_graph_is_as_close_as_hugging_face_in_bfloat16(name: str) -> None:
    rounded = tiny_model(name, dtype=torch.bfloat16)
    exact = tiny_model(name, dtype=torch.bfloat16).float()
    imported = import_model(rounded.config, torch.bfloat16)
    verify(imported.graph)
    for length, first in PROMPTS[1:]:
        ids, positions = prompt(length, first)
        expected = hugging_face(exact, ids, positions)
        noise = (hugging_face(rounded, ids, positions) - expected).square().mean().sqrt()
        error = (traced(imported, rounded, ids, positions) - expected).square().mean().sqrt()
        assert error <= 1.5 * noise
