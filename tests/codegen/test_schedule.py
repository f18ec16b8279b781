"""Layers become calls of as few bodies as there are distinct layers."""

from __future__ import annotations

import pytest

from octavo.codegen.generate import schedule_of
from octavo.codegen.lower import Line
from octavo.codegen.schedule import Call, layer_of
from octavo.ir.graph import Graph
from octavo.ir.types import SymDim, TensorType
from tests.codegen.llama import llama


@pytest.mark.parametrize("layers", [2, 3, 30])
def test_equal_layers_are_calls_of_one_body(layers: int) -> None:
    schedule = schedule_of(llama(layers=layers))
    assert [body.name for body in schedule.bodies] == ["layer"]
    assert [call.part.slots for call in schedule.calls] == [(slot,) for slot in range(layers)]


def test_local_and_global_layers_are_two_bodies() -> None:
    schedule = schedule_of(llama(layers=6, windows=(4, None)))
    names = [call.body.name for call in schedule.calls]
    assert names == ["layer_0", "layer_1"] * 3


def test_the_cut_moves_behind_a_fused_norm() -> None:
    """The next layer's norm is fused into this layer's add: bodies end with it, the last too."""
    schedule = schedule_of(llama(layers=4))
    for call in schedule.calls:
        assert call.part.lines[0].op == "linear"
        assert call.part.lines[-1].op == "add_rms_norm"
    assert schedule.calls[-1].part.lines[-1].outputs[0].name == "norm"


def test_results_of_a_call_feed_the_next() -> None:
    schedule = schedule_of(llama(layers=3))
    for call, following in zip(schedule.calls, schedule.calls[1:], strict=False):
        assert set(call.results) <= set(following.part.arguments)


def test_one_layer_stays_inline() -> None:
    schedule = schedule_of(llama(layers=1))
    assert schedule.bodies == ()
    assert not any(isinstance(step, Call) for step in schedule.steps)


def test_plans_and_tables_come_before_the_layers() -> None:
    steps = schedule_of(llama(layers=2, windows=(4, None))).steps
    early = [step.op for step in steps[:5] if isinstance(step, Line)]
    assert early == [
        "embedding",
        "embedding",
        "plan.rotary_kv_write",
        "plan.paged_attention",
        "plan.paged_attention",
    ]


def test_every_line_runs_once_and_in_order() -> None:
    graph = llama(layers=5)
    made = set(graph.inputs)
    for line, in_text in schedule_of(graph).expanded():
        assert line.op == in_text.op
        for value in line.operands:
            assert value.is_weight or value in made, f"{value} is read before it is made"
        made.update(line.outputs)
    assert {value for node in graph.nodes for value in node.outputs} <= made


def test_layers_out_of_order_stay_inline() -> None:
    graph = Graph("odd")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"), 8)))
    for name in ("layers.1.a", "layers.0.a", "layers.2.a"):
        x = graph.append("exp", x, name=name).output
    graph.outputs = [x]
    assert schedule_of(graph).bodies == ()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.3.mlp.up", 3),
        ("h.11", 11),
        ("decoder.layers.0.fc1", 0),
        ("layers_3.x", None),
        ("norm", None),
        ("layers.x", None),
    ],
)
def test_layer_of(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
