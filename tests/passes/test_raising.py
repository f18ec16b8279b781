"""What the raising passes make of real models: how many of each op, nothing missed, no ATen left.

The counts follow from the architectures: norms a layer (QK norms included), rotations of q and k
in the layers that have them, one activation a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.ir.graph import Graph
from octavo.passes.pipeline import PIPELINE, Stage, run_pipeline

RAISING = PIPELINE[: PIPELINE.index("page-attention")]
OPS = ("rms_norm", "layer_norm", "rotary", "gated_activation", "gelu", "relu", "softcap", "linear")

# Layers by parts, and the final norm and LM head. Gemma and Cohere 2 have four layers here.
EXPECTED: dict[str, dict[str, int]] = {
    "llama": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "llama-tied": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "qwen2": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "qwen3": {"rms_norm": 9, "rotary": 4, "gated_activation": 2, "linear": 15},
    "mistral": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "gemma2": {"rms_norm": 17, "rotary": 8, "gated_activation": 4, "softcap": 1, "linear": 29},
    "gemma3_text": {"rms_norm": 25, "rotary": 8, "gated_activation": 4, "linear": 29},
    "gpt2": {"layer_norm": 5, "gelu": 2, "linear": 9},
    "gpt_neox": {"layer_norm": 5, "rotary": 4, "gelu": 2, "linear": 9},
    "opt": {"layer_norm": 5, "relu": 2, "linear": 13},
    "phi3": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 9},
    "stablelm": {"layer_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "cohere": {"layer_norm": 7, "rotary": 4, "gated_activation": 2, "linear": 15},
    # Every other layer is global, without positions.
    "cohere2": {"layer_norm": 5, "rotary": 4, "gated_activation": 4, "linear": 29},
    "glm": {"rms_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 13},
    "gptj": {"layer_norm": 3, "rotary": 4, "gelu": 2, "linear": 13},
    "olmo": {"layer_norm": 5, "rotary": 4, "gated_activation": 2, "linear": 15},
    "olmo2": {"rms_norm": 9, "rotary": 4, "gated_activation": 2, "linear": 15},
}
# All in bf16, where casts stand around everything. In f32 the patterns are plainer: one of each
# kind of norm and rotation.
IN_F32 = ("llama", "gemma2", "cohere", "gptj")

CASES = [
    *((name, torch.bfloat16) for name in EXPECTED),
    *((name, torch.float32) for name in IN_F32),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).split(".")[-1])
def test_models_are_raised_whole(
    traced: Callable[[str, Any], Any], name: str, dtype: torch.dtype
) -> None:
    imported = traced(name, dtype)
    graph = imported.graph
    stages = run_pipeline(graph, max_position=imported.max_position, passes=RAISING)
    assert _misses(stages) == []
    counts = Counter(node.op for node in graph.nodes)
    assert {op: counts[op] for op in OPS if counts[op]} == EXPECTED[name]
    assert [op for op in counts if op.startswith("aten.")] == []
    if "gemma" in name:
        _assert_plain_weights(graph)


def _assert_plain_weights(graph: Graph) -> None:
    """Gemma's 1 + w is an attribute, and the weight is the checkpoint's own."""
    for node in graph.find("rms_norm"):
        assert node.attrs["weight_offset"] == 1.0
        assert graph.producer(node.operand(1), "checkpoint") is not None


def _misses(stages: list[Stage]) -> list[str]:
    raising = (stage for stage in stages if stage.name.startswith("raise-"))
    return [f"{m.where}: {m.reason}" for stage in raising for m in stage.missed]
