"""Guided JSON is valid a hundred times out of a hundred, on models that were never asked nicely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.runtime.outputs import RequestOutput

COUNT = 100
# Everything in it is bounded, so that a model that has learnt nothing comes to an end as well.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
        "coast": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
    },
    "required": ["city", "population", "coast", "rivers"],
    "additionalProperties": False,
}


def assert_valid(output: RequestOutput) -> None:
    [completion] = output.outputs
    assert completion.finish_reason == "stop", completion
    value = json.loads(completion.text)
    assert set(value) == set(SCHEMA["required"])
    assert isinstance(value["city"], str)
    assert 1 <= len(value["city"]) <= 12
    assert type(value["population"]) is int
    assert 0 <= value["population"] <= 40_000_000
    assert isinstance(value["coast"], bool)
    assert len(value["rivers"]) <= 2
    assert all(isinstance(each, str) and len(each) <= 10 for each in value["rivers"])


def hundred(compact: bool) -> list[SamplingParams]:
    guide = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=compact)
    temperatures = (0.0, 0.7, 1.0, 1.8)
    return [
        SamplingParams(
            temperature=temperatures[i % 4], seed=i, max_tokens=400, structured_outputs=guide
        )
        for i in range(COUNT)
    ]


def test_on_a_tiny_model_that_has_learnt_nothing(tiny_artifact: Path) -> None:
    """Its tokens are bytes: strings hold characters of several, which must come whole."""
    llm = LLM(tiny_artifact, max_model_len=250)
    texts = [f"A town, number {i}: " for i in range(COUNT)]
    outputs = llm.generate(texts, hundred(compact=True), use_tqdm=False)
    for output in outputs:
        assert_valid(output)
    assert len({output.outputs[0].text for output in outputs}) > COUNT // 2


@pytest.mark.slow
def test_on_smollm2(smollm2: Path) -> None:
    llm = LLM(smollm2)
    cities = ("Paris", "Oslo", "Lima", "Cairo", "Quito")
    chats = [
        [{"role": "user", "content": f"Describe {cities[i % 5]} in JSON."}] for i in range(COUNT)
    ]
    for output in llm.chat(chats, hundred(compact=False), use_tqdm=False):
        assert_valid(output)
