"""The pipeline names the pass at fault, where values came from, and what was missed."""

from __future__ import annotations

import pytest

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph
from octavo.passes.base import Missed, PassContext, Report, summarize
from octavo.passes.layers import layer_of
from octavo.passes.pipeline import Stage, run_pass, run_pipeline

GRAPH = """
graph @twice(%x: f32[T, 4]) {
  %layers.0.a: f32[T, 4] = neg(%x)
  %layers.1.b: f32[T, 4] = neg(%x)
  %sum: f32[T, 4] = add(%layers.0.a, %layers.1.b)
  return %sum
}
"""


def test_stages_are_numbered_and_seen_while_they_hold() -> None:
    graph = parse_graph(GRAPH)
    seen: list[tuple[int, str, int]] = []

    def look(stage: Stage) -> None:
        seen.append((stage.number, stage.name, len(graph.nodes)))

    stages = run_pipeline(graph, max_position=8, on_stage=look, passes=("clean", "fold-constants"))
    assert seen == [(0, "import", 3), (1, "clean", 2), (2, "fold-constants", 2)]
    assert [stage.rewrites for stage in stages] == [0, 1, 0]
    assert [stage.num_layers for stage in stages] == [2, 1, 1]
    assert parse_graph(stages[1].text).name == "twice"


def test_a_merged_value_names_both_of_the_stage_before() -> None:
    graph = parse_graph(GRAPH)
    run_pipeline(graph, max_position=8, passes=("clean",))
    merged = graph.value("%layers.0.a")
    assert merged.origin.values == ("%layers.0.a", "%layers.1.b")
    # What did not change says nothing, and the next stage starts afresh.
    assert graph.value("%sum").origin.values == ()
    run_pipeline(graph, max_position=8, passes=("fold-constants",))
    assert merged.origin.values == ()


def test_a_broken_graph_is_blamed_on_its_pass() -> None:
    def break_it(graph: Graph, report: Report) -> int:
        graph.nodes[-1].attrs["scalar"] = "two"
        return 1

    with pytest.raises(VerifyError, match=r"^after the pass break-it: %sum"):
        run_pass(parse_graph(GRAPH), "break-it", break_it, Report(PassContext(8)))


def test_what_is_dead_after_a_pass_is_swept() -> None:
    def drop_sum(graph: Graph, report: Report) -> int:
        graph.outputs = [graph.value("%layers.0.a")]
        return 1

    graph = parse_graph(GRAPH)
    run_pass(graph, "drop-sum", drop_sum, Report(PassContext(8)))
    assert [str(node.outputs[0]) for node in graph.nodes] == ["%layers.0.a"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("%layers.3.mlp.gate", 3),
        ("@h.11.attn~2", 11),
        ("%decoder.layers.0", 0),
        ("%0", 0),
        ("%norm", None),
        ("%rotary_emb.cast~1", None),
        ("%conv1d.x", None),
    ],
)
def test_layer_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("misses", "line"),
    [
        ([], ""),
        (
            [Missed("%layers.5.attn", "bias on k_proj")],
            "31 of 32 layers; layer 5: bias on k_proj",
        ),
        (
            [Missed(f"%layers.{i}.mlp", "no gate") for i in range(32)],
            "0 of 32 layers; all 32 layers: no gate",
        ),
        (
            [Missed("%layers.1.q", "x"), Missed("%layers.4.q", "x"), Missed("%norm", "y")],
            "30 of 32 layers; layers 1, 4: x; %norm: y",
        ),
        (
            [Missed(f"%layers.{i}.q", "x") for i in range(31)],
            "1 of 32 layers; 31 layers: x",
        ),
        ([Missed("%norm", "y")], "%norm: y"),
    ],
)
def test_misses_are_told_by_layer(misses: list[Missed], line: str) -> None:
    assert summarize(misses, 32) == line


def test_a_miss_is_noted_once_and_is_false() -> None:
    report = Report(PassContext(8))
    node = parse_graph(GRAPH).nodes[0]
    assert report.missed(node, "why") is False
    assert report.missed(node, "why") is False
    assert report.misses == [Missed("%layers.0.a", "why")]
