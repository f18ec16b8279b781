"""Every stage of every tiny model verifies, round-trips through text, and gives the same logits.

The logits are those of the imported graph, one sequence at a time; see tests/stage_logits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from octavo.ir.equal import structurally_equal
from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph
from octavo.ir.random_inputs import RandomSource
from octavo.ir.types import DTYPES
from octavo.passes.pipeline import CUDA_PIPELINE, PIPELINE, Stage, run_pipeline
from tests.model_zoo import MORE, TINY
from tests.stage_logits import stage_logits
from tests.tolerances import assert_same


@dataclass(frozen=True)
class _Weights:
    """Random checkpoint tensors; the model's own buffers."""

    random: RandomSource
    buffers: Mapping[str, Tensor]
    drawn: dict[str, Tensor] = field(default_factory=dict)

    def load(self, key: str) -> Tensor:
        """A random tensor for a checkpoint key."""
        if key not in self.drawn:
            self.drawn[key] = self.random.load(key)
        return self.drawn[key]

    def buffer(self, key: str) -> Tensor:
        """What the model computed when it was built."""
        return self.buffers[key]


# The architectures that have to come out right are tested in both dtypes.
MODELS = [*((name, "f32") for name in (*TINY, *MORE)), *((name, "bf16") for name in TINY)]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_every_stage_gives_the_same_logits(
    traced: Callable[[str, Any], Any], name: str, dtype: str
) -> None:
    imported = traced(name, DTYPES[dtype])
    graph = imported.graph
    weights = _Weights(RandomSource(graph), imported.buffers)
    check = _StageCheck(graph, weights, stage_logits(graph, weights))
    stages = run_pipeline(graph, max_position=imported.max_position, on_stage=check)
    assert [stage.name for stage in stages] == ["import", *PIPELINE]
    assert not graph.find("attention"), "attention was not paged"
    own = next(i for i, (a, b) in enumerate(zip(PIPELINE, CUDA_PIPELINE, strict=False)) if a != b)
    # The passes before are the same for all targets; stage 0 is before the first.
    check.graph = parse_graph(stages[own].text)
    run_pipeline(
        check.graph,
        max_position=imported.max_position,
        on_stage=check,
        passes=CUDA_PIPELINE[own:],
    )


@dataclass
class _StageCheck:
    """That the graph, after each pass, is what its text says and gives the wanted logits."""

    graph: Graph
    weights: _Weights
    want: list[Tensor]
    last: Graph | None = None  # whose logits were right

    def __call__(self, stage: Stage) -> None:
        parsed = parse_graph(stage.text)
        assert structurally_equal(parsed, self.graph) is None
        if self.last is not None and structurally_equal(parsed, self.last, origins=False) is None:
            return  # the pass found nothing to do
        got = stage_logits(self.graph, self.weights)
        for index, (one, other) in enumerate(zip(got, self.want, strict=True)):
            what = f"stage {stage.number} {stage.name}, sequence {index}"
            assert_same(one.to(other.dtype), other, what)
        self.last = parsed
