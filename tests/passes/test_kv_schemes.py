"""page-attention makes the KV cache of the scheme that it is told to."""

from __future__ import annotations

import pytest

from octavo.ir.graph import Graph
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.parser import parse_graph
from octavo.ir.types import KVType
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.pipeline import run_pass

# Two calls on the same K and V, so one slot, and one on another.
TEXT = """graph @m(%q: f32[1, 4, T, 16], %k: f32[1, 2, T, 16], %v: f32[1, 2, T, 8]) {
  %one: f32[1, T, 4, 8] = attention(%q, %k, %v, scale=0.25) // hf: layers.0.attn
  %two: f32[1, T, 4, 8] = attention(%q, %k, %v, scale=0.5) // hf: layers.1.attn
  %w: f32[1, 2, T, 8] = neg(%v)
  %three: f32[1, T, 4, 8] = attention(%q, %k, %w, scale=0.5) // hf: layers.2.attn
  return %one, %two, %three
}
"""


def paged(scheme: str, *, has_kv_scales: bool) -> Graph:
    graph = parse_graph(TEXT)
    found = KVScheme.parse(scheme)
    report = Report(PassContext(16, kv_scheme=found, has_kv_scales=has_kv_scales))
    assert run_pass(graph, "page-attention", find_pass("page-attention"), report) == 3
    return graph


@pytest.mark.parametrize("scheme", ["f8e4m3 head", "f8e4m3 token", "i8 token"])
def test_the_state_has_the_scheme(scheme: str) -> None:
    graph = paged(scheme, has_kv_scales=False)
    [state] = [value.type for value in graph.inputs if isinstance(value.type, KVType)]
    assert str(state) == f"kv<{scheme}, 2 x [2, 16, 8]>"
    assert not graph.weight_nodes


def test_scales_of_heads_are_weights_named_after_the_module() -> None:
    graph = paged("f8e4m3 head", has_kv_scales=True)
    assert [(node.op, node.attrs["key"]) for node in graph.weight_nodes] == [
        ("buffer", "layers.0.attn.k_scale"),
        ("buffer", "layers.0.attn.v_scale"),
        ("buffer", "layers.2.attn.k_scale"),
        ("buffer", "layers.2.attn.v_scale"),
    ]
    assert {str(node.output.type) for node in graph.weight_nodes} == {"f32[2]"}
    read = [[str(value) for value in node.operands[-2:]] for node in graph.find("paged_attention")]
    first, second = ["@one.k_scale", "@one.v_scale"], ["@three.k_scale", "@three.v_scale"]
    assert read == [first, first, second]
    written = [[str(v) for v in node.operands[-2:]] for node in graph.find("kv_write")]
    assert written == [first, second]
