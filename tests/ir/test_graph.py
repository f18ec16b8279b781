"""The edits that passes are made of: names, use lists, order."""

from __future__ import annotations

import networkx
import pytest

from octavo.ir.graph import Graph, Origin
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.types import SymDim, TensorType
from octavo.ir.verify import verify

CHAIN = """graph @g(%x: f32[T, 8], @w: f32[8, 8]) {
  %layers.0.proj: f32[T, 8] = linear(%x, @w)  // hf: model.layers.0 m.py:1
  %a: f32[T, 8] = silu(%layers.0.proj)
  %b: f32[T, 8] = add(%layers.0.proj, %a)
  return %b
}
"""


@pytest.fixture
def graph() -> Graph:
    return parse_graph(CHAIN)


def test_a_replacement_takes_name_place_and_origin_over(graph):
    old = graph.value("%layers.0.proj").producer
    new = graph.insert_before(old, "relu", graph.inputs[0])
    assert str(new.output) == "%layers.0.proj~1"
    graph.replace_all(old.outputs, new.outputs)
    assert str(new.output) == "%layers.0.proj"
    assert new.output.origin == Origin("model.layers.0", "m.py:1")
    assert graph.sweep() == 2  # the linear and its weight
    verify(graph)
    assert [node.op for node in graph.nodes] == ["relu", "silu", "add"]


def test_a_replacement_under_another_name_keeps_it(graph):
    old = graph.value("%a").producer
    new = graph.insert_before(old, "relu", old.inputs[0], name="other")
    graph.replace_all(old.output, new.output)
    assert str(new.output) == "%other"
    assert str(old.output) == "%a"


def test_names_made_unique_hand_over_all_the_same(graph):
    anchor = graph.value("%a").producer
    first = graph.insert_before(anchor, "relu", graph.inputs[0])
    second = graph.insert_before(first, "neg", graph.inputs[0])
    assert [str(first.output), str(second.output)] == ["%a~1", "%a~2"]
    graph.replace_all(first.output, second.output)
    assert str(second.output) == "%a~1"
    verify(graph)


def test_a_value_may_be_replaced_by_one_made_from_it(graph):
    old = graph.value("%layers.0.proj")
    new = graph.insert_after(old.producer, "neg", old)
    graph.replace_all(old, new.output)
    verify(graph)
    assert new.inputs == [old]
    assert graph.users(old) == [new]
    assert len(graph.users(new.output)) == 2


def test_a_result_of_the_graph_is_replaced_too(graph):
    new = graph.append("neg", graph.inputs[0])
    graph.replace_all(graph.outputs[0], new.output)
    assert graph.outputs == [new.output]


def test_sole_user(graph):
    a, proj, b = (graph.value(name) for name in ("%a", "%layers.0.proj", "%b"))
    assert graph.sole_user(a) is b.producer
    assert graph.sole_user(proj) is None  # two read it
    assert graph.sole_user(b) is None  # nobody, and it is a result
    graph.outputs.append(a)
    assert graph.sole_user(a) is None  # a result has one reader more


def test_one_node_that_reads_a_value_twice_is_one_user():
    graph = parse_graph("graph @g(%x: f32[T]) {\n  %y: f32[T] = add(%x, %x)\n  return %y\n}")
    assert graph.users(graph.inputs[0]) == graph.nodes
    graph.set_inputs(graph.nodes[0], [graph.inputs[0], None])
    assert graph.users(graph.inputs[0]) == graph.nodes


def test_sweep_clears_both_regions_and_frees_names(graph):
    graph.append("relu", graph.inputs[0], name="dead")
    graph.constant("iota", n=4, name="dead")
    assert graph.sweep() == 2
    assert not graph.has_value("%dead")
    assert not graph.has_value("@dead")
    assert print_graph(graph) == CHAIN
    assert graph.sweep() == 0


def test_erase_refuses_what_is_read(graph):
    with pytest.raises(AssertionError, match="still read"):
        graph.erase(graph.value("%a").producer)
    with pytest.raises(AssertionError, match="result of the graph"):
        graph.erase(graph.nodes[-1])
    dead = graph.append("relu", graph.inputs[0])
    graph.erase(dead)
    assert print_graph(graph) == CHAIN


def test_rename_makes_a_taken_name_unique(graph):
    graph.rename(graph.value("%a"), "b")
    assert str(graph.nodes[1].output) == "%b~1"
    graph.rename(graph.nodes[1].output, "my name!")
    assert str(graph.nodes[1].output) == "%my_name_"
    verify(graph)


def test_attributes_of_pytorch_ops_may_be_called_self():
    graph = Graph("g")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"),)))
    node = graph.append("aten.pow.Scalar", x, self=2.0)
    assert str(node.output.type) == "f32[T]"


def test_networkx_sees_data_flow_in_list_order(graph):
    view = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(view)
    place = {node: index for index, node in enumerate(graph.all_nodes())}
    nodes = [item for item in networkx.topological_sort(view) if item in place]
    for before, after in [(a, b) for a in nodes for b in nodes if networkx.has_path(view, a, b)]:
        assert place[before] <= place[after]
    assert view.nodes[graph.value("%a")]["type"] == "f32[T, 8]"
    assert view.edges[graph.value("@w"), graph.nodes[0]]["index"] == 1
    dominators = networkx.immediate_dominators(view, graph.inputs[0])
    assert dominators[graph.value("%b").producer] is graph.value("%layers.0.proj")
