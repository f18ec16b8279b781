"""Each rule of the IR, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Kind
from octavo.ir.parser import parse_graph
from octavo.ir.types import SymDim, TensorType
from octavo.ir.verify import verify

STEP = """graph @g(%x: f32[T, 8]) {
  weights {
    @w: f32[8, 8] = checkpoint(key="w")
    @v: f32[8, 8] = neg(@w)
  }
  %a: f32[T, 8] = linear(%x, @v)
  %b: f32[T, 8] = silu(%a)
  %c: f32[T, 8] = add(%a, %b)
  return %c
}
"""

PAGED = """graph @g(%k: f32[T, 2, 8], %slots: i64[T], %table: i32[S, B], %start: i32[S+1],
    %lens: i32[S], %kv: kv<f32, 2 x [2, 8, 8]>) {
  %kv~1: kv<f32, 2 x [2, 8, 8]> = kv_write(%kv, %k, %k, %slots, slot=0)
  %a: f32[T, 2, 8] = paged_attention(%k, %kv~1, %table, %start, %lens, slot=0, scale=1.0)
  %kv~2: kv<f32, 2 x [2, 8, 8]> = kv_write(%kv~1, %a, %a, %slots, slot=1)
  %b: f32[T, 2, 8] = paged_attention(%a, %kv~2, %table, %start, %lens, slot=1, scale=1.0)
  return %b, %kv~2
}
"""


@pytest.fixture
def graph() -> Graph:
    parsed = parse_graph(STEP)
    verify(parsed)
    return parsed


def broken(graph: Graph) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    return str(caught.value)


def test_use_before_definition(graph):
    graph.nodes.reverse()
    assert broken(graph).startswith("%c: reads %a, which is not defined before it")


def test_use_before_definition_among_weights(graph):
    graph.weight_nodes.reverse()
    assert broken(graph).startswith("@v: reads @w, which is not defined before it")


def test_a_node_in_the_list_twice(graph):
    graph.nodes.append(graph.nodes[0])
    assert broken(graph) == "%a: defined twice; a value has one definition"


def test_a_node_lost_from_the_list(graph):
    graph.outputs = [graph.value("%b")]
    del graph.nodes[2]
    assert broken(graph) == "%c: its node is in no region; use Graph.erase to remove a node"


def test_a_result_of_another_graph(graph):
    graph.outputs = [parse_graph(STEP).outputs[0]]
    assert broken(graph).startswith("return: %c is not defined in the graph")


def test_a_name_set_by_hand(graph):
    graph.value("%b").name = "a"
    assert broken(graph).startswith("%a: another value has this name; use Graph.rename")


def test_a_weight_that_depends_on_the_step(graph):
    graph.set_inputs(graph.weight_nodes[1], [graph.inputs[0]])
    assert broken(graph).startswith("@v: a weight depends on the step's %x")


def test_a_value_of_the_wrong_kind(graph):
    graph.value("%b").kind = Kind.INPUT
    assert "expected a value of kind step" in broken(graph)


def test_operands_set_by_hand(graph):
    graph.nodes[2].inputs[0] = graph.inputs[0]
    assert broken(graph).startswith("%c: is no user of its operand %x; change operands by")


def test_a_missing_operand(graph):
    graph.set_inputs(graph.nodes[0], [graph.inputs[0], None])
    assert broken(graph) == "%a: linear: operand 'weight' is missing"


def test_operands_that_do_not_fit(graph):
    wide = graph.add_input("wide", TensorType("f32", (SymDim("T"), 9)))
    graph.set_inputs(graph.nodes[0], [wide, graph.value("@v")])
    assert broken(graph).startswith("%a: linear: the last dim of f32[T, 9] is not K")


def test_a_stale_type(graph):
    other = graph.add_input("other", TensorType("f32", (SymDim("S"), 8)))
    graph.set_inputs(graph.nodes[0], [other, graph.value("@v")])
    assert broken(graph) == (
        "%a: linear gives f32[S, 8], but its results are declared f32[T, 8]; "
        "make a new node where operand types change"
    )


@pytest.mark.parametrize("attrs", [{}, {"eps": 1e-6, "weight_offset": 0.0}])
def test_incomplete_attributes(graph, attrs):
    node = graph.insert_after(graph.nodes[2], "rms_norm", graph.value("%c"), eps=1e-6)
    node.attrs = attrs
    assert "rms_norm" in broken(graph)
    assert "attribute" in broken(graph)


def test_unknown_attributes(graph):
    graph.nodes[1].attrs["slope"] = 2
    assert "silu has no attribute 'slope'" in broken(graph)


def test_a_dtype_that_is_none(graph):
    node = graph.insert_after(graph.nodes[2], "cast", graph.value("%c"), dtype="f16")
    node.attrs["dtype"] = "f17"
    assert "cast" in broken(graph)
    assert "unknown 'f17'" in broken(graph)


def test_the_kv_state_is_one_thread():
    graph = parse_graph(PAGED)
    verify(graph)
    first, read, second, _ = graph.nodes
    old = graph.value("%kv")

    graph.set_inputs(second, [old, *second.inputs[1:]])
    assert broken(graph) == (
        "%kv~2: reads the KV state %kv, which kv_write has overwritten in place; "
        "read %kv~1 or a later state"
    )
    graph.set_inputs(second, [first.output, *second.inputs[1:]])
    verify(graph)

    graph.set_inputs(read, [read.inputs[0], old, *read.inputs[2:]])
    assert broken(graph).startswith("%a: reads the KV state %kv, which kv_write has overwritten")
    graph.set_inputs(read, [read.inputs[0], first.output, *read.inputs[2:]])

    graph.outputs[1] = first.output
    assert broken(graph).startswith("return: reads the KV state %kv~1, which kv_write")


def test_a_late_read_of_a_kv_state_is_found():
    graph = parse_graph(PAGED)
    read = graph.nodes.pop(1)
    graph.nodes.append(read)
    graph.set_inputs(
        graph.nodes[1], [graph.nodes[1].inputs[0], *[graph.inputs[0]] * 2, graph.nodes[1].inputs[3]]
    )
    graph.set_inputs(graph.nodes[2], [graph.inputs[0], *graph.nodes[2].inputs[1:]])
    assert broken(graph).startswith("%a: reads the KV state %kv~1, which kv_write has overwritten")


def test_the_cost_is_linear():
    # 2,000 nodes in a fraction of a second: the pipeline verifies after each pass.
    import time

    graph = Graph("long")
    value = graph.add_input("x", TensorType("f32", (SymDim("T"), 8)))
    for _ in range(2000):
        value = graph.append("silu", value).output
    graph.outputs = [value]
    started = time.process_time()
    verify(graph)
    assert time.process_time() - started < 1.0


def test_origins_are_no_rule(graph):
    value = graph.value("%b")
    value.origin = replace(value.origin, module="anything")
    verify(graph)
