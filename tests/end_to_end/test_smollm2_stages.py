"""Every stage of SmolLM2 as its artifact keeps it: the text parses, verifies, computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.frontend.cached_weights import CachedWeights
from octavo.frontend.source import open_weights, resolve
from octavo.frontend.trace import BoundWeights, import_model
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.verify import verify
from octavo.passes.pipeline import PIPELINE
from tests.stage_logits import stage_logits
from tests.tolerances import DEEP_REWRITE, distance

STAGES = [f"{n:02}-{name}" for n, name in enumerate(("import", *PIPELINE))]


@pytest.fixture(scope="module")
def weights(smollm2_gguf: Path) -> BoundWeights:
    source = resolve(smollm2_gguf)
    imported = import_model(source.config, torch.float32)
    stored = open_weights(source, imported.model)
    return BoundWeights(CachedWeights(stored, torch.float32), imported.buffers)


@pytest.fixture(scope="module")
def imported_logits(smollm2: Path, weights: BoundWeights) -> list[Tensor]:
    text = (smollm2 / "ir" / f"{STAGES[0]}.ir").read_text("utf-8")
    return stage_logits(parse_graph(text), weights)


@pytest.mark.parametrize("stage", STAGES)
def test_stage(
    stage: str, smollm2: Path, weights: BoundWeights, imported_logits: list[Tensor]
) -> None:
    text = (smollm2 / "ir" / f"{stage}.ir").read_text("utf-8")
    graph = parse_graph(text, f"{stage}.ir")
    verify(graph)
    assert print_graph(graph) == text
    for got, want in zip(stage_logits(graph, weights), imported_logits, strict=True):
        assert distance(got, want) <= DEEP_REWRITE


def test_all_stages_are_kept(smollm2: Path) -> None:
    assert sorted(path.stem for path in (smollm2 / "ir").glob("*.ir")) == STAGES
