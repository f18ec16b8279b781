"""Recipes: whose patterns match which modules, and what a module is called."""

from __future__ import annotations

import pytest

from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.passes.quant_recipe import Module, Modules, Recipe, matrix_keys

INT4, INT8 = (QuantScheme.parse(text) for text in ("int4<1x32, f32>", "int8<1x*, f32>"))
MODEL = """graph @m(%x: f32[T, 64]) {
  weights {
    @n: f32[64] = checkpoint(key="model.layers.2.norm.weight")
    @q: f32[64, 64] = checkpoint(key="model.layers.0.attn.q.weight")
    @k: f32[64, 64] = checkpoint(key="model.layers.0.attn.k.weight")
    @qk: f32[128, 64] = concat(@q, @k, dim=0)
    @up: f32[64, 64] = checkpoint(key="model.layers.1.mlp.up.weight")
    @gate: f32[64, 64] = checkpoint(key="model.layers.2.mlp.gate.weight")
    @folded: f32[64, 64] = mul(@gate, @n)
    @head: f32[9, 64] = checkpoint(key="embed.weight")
  }
  %qk: f32[T, 128] = linear(%x, @qk)
  %up: f32[T, 64] = linear(%x, @up)
  %gate: f32[T, 64] = linear(%up, @folded)
  %head: f32[T, 9] = linear(%gate, @head)
  %capped: f32[T, 9] = softcap(%head, cap=3.0)
  %logits: f32[T, 9] = mul(%capped, scalar=2.0)
  return %logits, %qk
}
"""


def modules(graph: Graph) -> dict[str, list[Module]]:
    names = Modules(graph)
    return {node.output.name: names.of(node) for node in graph.find("linear")}


def test_modules_go_by_the_keys_of_their_matrices() -> None:
    found = modules(parse_graph(MODEL))
    assert [module.paths for module in found["qk"]] == [
        ("model.layers.0.attn.q", "first.attn.q"),
        ("model.layers.0.attn.k", "first.attn.k"),
    ]
    assert [module.paths for module in found["up"]] == [("model.layers.1.mlp.up",)]
    [gate] = found["gate"]
    assert gate.paths == ("model.layers.2.mlp.gate", "last.mlp.gate")
    assert gate.is_special
    [head] = found["head"]
    assert head == Module(("embed", "lm_head"), is_head=True)


def test_vectors_are_no_matrices() -> None:
    graph = parse_graph(MODEL)
    assert matrix_keys(graph.value("@folded")) == ["model.layers.2.mlp.gate.weight"]


def test_patterns_without_a_match_are_known() -> None:
    every = [module for found in modules(parse_graph(MODEL)).values() for module in found]
    rules = {
        "*.q": INT4,
        "first.*": None,
        "*.q*": INT8,
        "*.ffn.*": INT4,
        "lm_*": INT8,
        "lm_head": INT8,
    }
    # A pattern that an earlier one leaves nothing to has a match all the same.
    assert Recipe("r", tuple(rules.items())).unmatched(every) == ["*.ffn.*", "lm_*"]


@pytest.mark.parametrize(
    ("rules", "path", "scheme"),
    [
        ((("*", INT4),), "layers.3.mlp.up", INT4),
        ((("*.up", INT8), ("*", INT4)), "layers.3.mlp.up", INT8),
        ((("*", INT4), ("*.up", INT8)), "layers.3.mlp.up", INT4),
        ((("*.up", None), ("*", INT4)), "layers.3.mlp.up", None),
        ((("*.down", INT4),), "layers.3.mlp.up", None),
        ((("layers.3.*", INT4),), "layers.3.mlp.up", INT4),
        ((("layers.3.*", INT4),), "layers.30.mlp.up", None),
        # A router has to be named.
        ((("*", INT4),), "layers.3.mlp.gate", None),
        ((("*.mlp.*", INT4),), "layers.3.mlp.router", None),
        ((("*.gate", INT8), ("*", INT4)), "layers.3.mlp.gate", INT8),
        ((("*", INT4),), "layers.3.mlp.gate_proj", INT4),
    ],
)
def test_the_first_pattern_that_matches_decides(
    rules: tuple[tuple[str, QuantScheme | None], ...], path: str, scheme: QuantScheme | None
) -> None:
    assert Recipe("r", rules).scheme_of(Module((path,))) == scheme


def test_the_head_has_to_be_named() -> None:
    head = Module(("model.embed_tokens", "lm_head"), is_head=True)
    assert Recipe("r", (("*", INT4),)).scheme_of(head) is None
    assert Recipe("r", (("*", INT4), ("lm_head", INT8))).scheme_of(head) == INT8
