"""A graph that is wrong in one attribute is refused; a right one brings the reference along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import tiny_model
from state_dict_weights import StateDictWeights

from octavo.frontend.check_trace import check_trace
from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.trace import Imported

DTYPES = [torch.float32, torch.bfloat16]
Importing = Callable[[str, torch.dtype], tuple[Imported, Any]]


@pytest.fixture
def imported(traced: Callable[[str, Any], Imported]) -> Importing:
    """``imported("llama", torch.float32)``: the trace of a model, and the model."""
    return lambda name, dtype: (traced(name, dtype), tiny_model(name, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "gpt2"])
def test_a_right_graph_passes_with_its_reference(
    imported: Importing, name: str, dtype: torch.dtype
) -> None:
    traced, model = imported(name, dtype)
    check = check_trace(traced, model.config, dtype, StateDictWeights(model))
    assert check.distance.is_within(check.bound)
    assert [(len(ids), first) for ids, first in check.prompts] == [(1, 0), (24, 0), (6, 250)]
    for (ids, first), logits, row in zip(check.prompts, check.logits, check.rows, strict=True):
        with torch.no_grad():
            expected = model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(first, first + len(ids))[None],
                attention_mask=torch.ones(1, len(ids)),
            ).logits[0]
        assert torch.equal(logits, expected.float())
        top = expected[-1].float().log_softmax(-1).topk(8)
        assert row.ids == tuple(ids)
        assert row.top_ids == tuple(top.indices.tolist())
        assert row.top_logprobs == tuple(top.values.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("mistral", "window", 9),
        ("mistral", "window", None),
        ("llama", "scale", 0.3),
        ("llama", "chunk", 20),
        ("gemma2", "softcap", 1.0),
    ],
)
def test_a_wrong_attention_is_refused(
    imported: Importing, name: str, attribute: str, value: float | None, dtype: torch.dtype
) -> None:
    traced, model = imported(name, dtype)
    for node in traced.graph.find("attention"):
        node.attrs[attribute] = value
    with pytest.raises(RefusedArchitecture, match="disagrees with Hugging Face by"):
        check_trace(traced, model.config, dtype, StateDictWeights(model))


def test_forgotten_position_is_refused(imported: Importing) -> None:
    traced, model = imported("gpt2", torch.float32)
    (table,) = [n for n in traced.graph.find("embedding") if n.inputs[0] is traced.graph.inputs[1]]
    traced.graph.set_inputs(table, [traced.graph.inputs[0], table.inputs[1]])
    with pytest.raises(RefusedArchitecture, match="disagrees with Hugging Face by"):
        check_trace(traced, model.config, torch.float32, StateDictWeights(model))
