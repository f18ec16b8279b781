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


def paged(
    scheme: str, *, has_kv_scales: bool, has_kv_offsets: bool = False, text: str = TEXT
) -> Graph:
    graph = parse_graph(text)
    context = PassContext(
        16,
        kv_scheme=KVScheme.parse(scheme),
        has_kv_scales=has_kv_scales,
        has_kv_offsets=has_kv_offsets,
    )
    report = Report(context)
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


@pytest.mark.parametrize("has_kv_scales", [True, False])
def test_offsets_are_weights_named_after_the_call(has_kv_scales: bool) -> None:
    graph = paged("f8e4m3 head", has_kv_scales=has_kv_scales, has_kv_offsets=True)
    offsets = [node for node in graph.weight_nodes if node.attrs["key"].endswith("k_offset")]
    keys = [node.attrs["key"] for node in offsets]
    assert keys == ["one.k_offset", "three.k_offset"]
    assert {str(node.output.type) for node in offsets} == {"f32[2, 16]"}
    scales = [["@one.k_scale", "@one.v_scale"], ["@three.k_scale", "@three.v_scale"]]
    absent = [["None", "None"]] * 2
    written = [[str(value) for value in node.inputs[-3:]] for node in graph.find("kv_write")]
    expected = zip(scales if has_kv_scales else absent, ["@one", "@three"], strict=True)
    assert written == [[*before, f"{name}.k_offset"] for before, name in expected]
    names = [str(v) for node in graph.find("paged_attention") for v in node.operands]
    assert not any(name.endswith("k_offset") for name in names), "no read adds it again"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The softcap is of the second reader of the first slot.
        ("(%q, %k, %v, scale=0.5)", "(%q, %k, %v, scale=0.5, softcap=3.0)"),
        ("(%q, %k, %v, scale=0.25)", "(%q, %k, %v, @sinks, scale=0.25)"),
    ],
    ids=["softcap", "sinks"],
)
def test_keys_whose_scores_are_not_just_compared_have_no_offset(old: str, new: str) -> None:
    text = TEXT.replace(old, new).replace("f32[1, 2, T, 8])", "f32[1, 2, T, 8], @sinks: f32[4])")
    graph = paged("f8e4m3 head", has_kv_scales=False, has_kv_offsets=True, text=text)
    assert [len(node.inputs) for node in graph.find("kv_write")] == [4, 7]
    assert str(graph.find("kv_write")[1].inputs[-1]) == "@three.k_offset"
