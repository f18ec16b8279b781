"""The memory plan shares buffers, and never between two values that are alive at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.codegen.generate import schedule_of
from octavo.codegen.memory import Buffer, check_memory_plan, plan_memory, unit_size
from octavo.ir.graph import Graph
from octavo.ir.types import SymDim, TensorType
from tests.codegen.batches import batch
from tests.codegen.llama import llama
from tests.codegen.loading import Compiled

T = SymDim("T")


@pytest.mark.parametrize(
    "sizes",
    [{}, {"layers": 1}, {"layers": 8}, {"windows": (4, None), "layers": 4}, {"dtype": "bf16"}],
    ids=str,
)
def test_no_two_live_values_share_a_buffer(sizes: dict[str, Any]) -> None:
    schedule = schedule_of(llama(**sizes))
    check_memory_plan(schedule, plan_memory(schedule))


def test_the_checker_sees_a_plan_that_is_wrong() -> None:
    schedule = schedule_of(llama(layers=2))
    plan = plan_memory(schedule)
    one = Buffer("T", 1 << 20, list(plan.buffer_of))
    plan.buffer_of.update((v, one) for v in plan.buffer_of if (unit_size(v.tensor) or "")[0] == "T")
    with pytest.raises(AssertionError, match=r"overwrites .*, which is still read"):
        check_memory_plan(schedule, plan)


def test_layers_add_no_memory() -> None:
    few, many = (plan_memory(schedule_of(llama(layers=n))) for n in (2, 12))
    assert many.bytes_per("T") == few.bytes_per("T")
    assert many.unplanned == []


def test_sharing_saves_four_tenths_of_a_llama() -> None:
    plan = plan_memory(schedule_of(llama(layers=2, hidden=64, inter=192, head_dim=16)))
    assert plan.bytes_per("T") <= 0.6 * plan.unshared_bytes_per("T")


def chain(*ops: str) -> Graph:
    graph = Graph("chain")
    x = graph.add_input("x", TensorType("f32", (T, 16)))
    for op in ops:
        x = graph.append(op, x, name=op).output
    graph.outputs = [x]
    return graph


def test_elementwise_ops_work_in_place() -> None:
    plan = plan_memory(schedule_of(chain("exp", "neg", "tanh")))
    assert [[v.name for v in b.values] for b in plan.buffers] == [["exp", "neg", "tanh"]]


def test_an_operand_that_is_not_there_is_not_overwritten() -> None:
    graph = chain("exp")
    half = graph.append("mul", graph.outputs[0], None, scalar=0.5, name="half")
    graph.outputs = [half.output]
    plan = plan_memory(schedule_of(graph))
    assert [[v.name for v in b.values] for b in plan.buffers] == [["exp", "half"]]


def test_a_view_keeps_its_base_alive() -> None:
    graph = chain("exp")
    x = graph.outputs[0]
    view = graph.append("transpose", x, dim0=0, dim1=1, name="view").output
    other = graph.append("exp", graph.inputs[0], name="other").output
    back = graph.append("transpose", view, dim0=0, dim1=1, name="back").output
    graph.outputs = [graph.append("add", other, back, name="sum").output]
    plan = plan_memory(schedule_of(graph))
    assert plan.buffer_of[x] is not plan.buffer_of[other]


def test_no_result_overwrites_what_a_view_of_it_still_reads() -> None:
    """``x + transpose(x)`` in place would read sums where it wants terms."""
    graph = Graph("square")
    x = graph.append("exp", graph.add_input("x", TensorType("f32", (T, 1, 4, 4))), name="x").output
    turned = graph.append("transpose", x, dim0=2, dim1=3, name="turned").output
    graph.outputs = [graph.append("add", x, turned, name="sum").output]
    plan = plan_memory(schedule_of(graph))
    assert plan.buffer_of[x] is not plan.buffer_of[graph.outputs[0]]


def test_a_result_alive_into_the_next_call_is_left_to_pytorch(tmp_path: Path) -> None:
    """Each layer reads the hidden state of two layers before: one buffer cannot hold both."""
    graph = llama(layers=1)
    embedded = next(n for n in graph.nodes if n.outputs[0].name == "embed_tokens")
    anchor = next(n for n in graph.nodes if n.op == "rms_norm")
    before, x = embedded.output, embedded.output
    for layer in range(5):
        name = f"layers.{layer}.mix"
        wide = graph.insert_before(anchor, "exp", before, name=name)
        capped = graph.insert_before(anchor, "tanh", wide.output, name=name)
        before, x = x, graph.insert_before(anchor, "add", x, capped.output, name=name).output
    graph.set_inputs(anchor, [x, *anchor.inputs[1:]])
    for node in graph.nodes:  # the names of the one real layer would make it a sixth
        for value in node.outputs:
            if ".self_attn" in value.name or ".mlp" in value.name or "layernorm" in value.name:
                graph.rename(value, value.name.replace("layers.0.", "top.").replace("layers.", "t"))
    schedule = schedule_of(graph)
    plan = plan_memory(schedule)
    check_memory_plan(schedule, plan)
    assert len(schedule.calls) >= 3
    assert plan.unplanned
    Compiled(graph, tmp_path / "skipping").check(batch(graph, [(0, 5), (3, 1)]), 2e-5)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((T, 16), ("T", 64)),
        ((SymDim("T", 4), 16), ("T", 256)),
        ((2, T, 3), ("T", 24)),
        ((8,), None),
        ((T, T), None),
        ((SymDim("S", 1, 1),), None),
    ],
    ids=str,
)
def test_unit_size(shape: tuple[Any, ...], size: tuple[str, int] | None) -> None:
    assert unit_size(TensorType("f32", shape)) == size
