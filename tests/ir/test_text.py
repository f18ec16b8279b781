"""The text form: what it looks like, and that reading what was printed changes nothing."""

from __future__ import annotations

import math

import pytest

from octavo.ir.equal import structurally_equal
from octavo.ir.graph import Graph, Origin
from octavo.ir.ops.aten import OperandRef
from octavo.ir.parser import parse_graph
from octavo.ir.printer import format_attr, print_graph
from octavo.ir.types import KVType, SlotShape, SymDim, TensorType
from octavo.ir.verify import verify

CANONICAL = {
    "weights in the head": """graph @residual(%x: bf16[T, 64], %r: bf16[T, 64], @w: bf16[64]) {
  %s: bf16[T, 64] = add(%x, %r)
  %n: bf16[T, 64] = rms_norm(%s, @w, eps=1e-05)
  return %n, %s
}
""",
    "a weights block, origins": """graph @m(%ids: i64[T]) {
  weights {
    @embed.weight: f32[50, 8] = checkpoint(key="model.embed.weight")
    @table: f32[2, 2] = literal(data=[[1.0, 2.5], [-inf, nan]])
    @zeros: f32[4] = fill(value=0.0)
    @row: f32[2] = select(@table, dim=0, index=1)
  }
  %embed: f32[T, 8] = embedding(%ids, @embed.weight)  // hf: model.embed modeling_x.py:4
  %scaled: f32[T, 8] = mul(%embed, scalar=2.0)  // from: %embed~1, @row
  %out: f32[T, 8] = neg(%scaled)  // hf: . from: %scaled
  %last: f32[T, 8] = neg(%out)  // hf: - modeling_x.py:9
  return %last, @row
}
""",
    "parameters with origins": """graph @m(
  %ids: i64[1, T],  // hf: model
  %positions: i64[1, T]
) {
  return %ids
}
""",
    "quantised weights": """graph @m(%x: bf16[T, 64]) {
  weights {
    @a: f32[8, 64] = checkpoint(key="a")
    @q: int4<1x32, bf16>[8, 64] = quantize(@a, scheme="int4<1x32, bf16>")
    @g: int4<1x32, bf16>[4, 64] = quantized(key="g", scheme="int4<1x32, bf16>", shape=[4, 64])
    @c: nf4<*x*, f32>[1, 9] = quantized_checkpoint(key="c", scheme="nf4<*x*, f32>", shape=[1, 9])
    @w: int4<1x32, bf16>[12, 64] = concat_rows(@q, @g)
    @f: f8e4m3<4x9, f32, x=f8e4m3/64>[8, 64] = quantize(@a, scheme="f8e4m3<4x9, f32, x=f8e4m3/64>")
    @b: bf16[8, 64] = dequantize(@f, dtype="bf16")
    @u: uint4<1x32, f16, zero=u8>[8, 64] = quantize(@a, scheme="uint4<1x32, f16, zero=u8>")
    @i: int8<1x*, f32, x=i8>[8, 64] = quantize(@a, scheme="int8<1x*, f32, x=i8>")
  }
  %y: bf16[T, 12] = linear(%x, @w)
  %z: bf16[T, 8] = linear(%x, @b)
  %u: bf16[T, 8] = linear(%x, @u)
  %v: f32[T, 8] = fused_linear(%x, @i, norm_eps=1e-05, out_dtype="f32")
  return %y, @c, %z, %u, %v
}
""",
    "symbolic attributes": """graph @m(%x: f32[T, 4, 8]) {
  %y: f32[4*T, 8] = reshape(%x, shape=[4*T, 8])
  %z: f32[4*T+4, 8] = aten.pad.default(%y, pad=[0, 0, 4, 0], mode="constant", value=none)
  return %z
}
""",
    "several results and lists of operands": """graph @m(%x: f32[T, 6], %m: bool[T, 6]) {
  %a: f32[T, 2], %b: f32[T, 4] = split(%x, sizes=[2, 4], dim=1)
  %s: f32[2, T, 6] = aten.stack.default(%x, %x, tensors=[$0, $1])
  %w: f32[T, 6] = aten.where.self(%m, %x, %x)
  return %a, %b, %s, %w
}
""",
    "absent operands": """graph @m(%q: f32[1, 4, T, 8], %k: f32[1, 2, T, 8], %b: f32[1, 4, T, T]) {
  %y: f32[1, T, 4, 8] = attention(%q, %k, %k, none, %b, scale=0.5, causal=false, window=8)
  return %y
}
""",
    "origins that differ": """graph @m(%x: f32[T, 8]) {
  %n: f32[T, 8], %s: f32[T, 8] = add_rms_norm(%x, %x, eps=1e-06)  // hf: norm | hf: add from: %a
  %o: f32[T, 8], %p: f32[T, 8] = add_rms_norm(%n, %s, eps=1e-06)  // none | from: %a
  return %o, %p
}
""",
    "a KV state": """graph @m(%k: f32[T, 2, 8], %slots: i64[T], %kv: kv<f32, 1 x [2, 8, 8]>) {
  %kv~1: kv<f32, 1 x [2, 8, 8]> = kv_write(%kv, %k, %k, %slots, slot=0)
  return %kv~1
}
""",
    "nothing at all": """graph @m() {
  return
}
""",
}


@pytest.mark.parametrize("text", CANONICAL.values(), ids=CANONICAL)
def test_canonical_text_is_a_fixed_point(text):
    graph = parse_graph(text)
    verify(graph)
    assert print_graph(graph) == text


def layered(num_layers: int) -> Graph:
    graph = Graph("layers")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"), 8)))
    for i in range(num_layers):
        key, origin = (
            f"model.layers.{i}.w",
            Origin(f"model.layers.{i}", "m.py:7", (f"%old_{3 * i}",)),
        )
        w = graph.constant(
            "checkpoint", key=key, type=TensorType("f32", (8, 8)), name=f"layers.{i}.w"
        )
        x = graph.append("linear", x, w, name=f"layers.{i}.proj", origin=origin).output
        x = graph.append("silu", x, name=f"layers.{i}", origin=origin).output
    graph.outputs = [x]
    return graph


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 2, 3, 30])
def test_layers_round_trip(num_layers, fold):
    graph = layered(num_layers)
    assert structurally_equal(graph, parse_graph(print_graph(graph, fold=fold))) is None


def test_thirty_layers_print_as_one():
    assert print_graph(layered(30)).splitlines() == [
        "graph @layers(%x: f32[T, 8]) {",
        "  weights {",
        "    repeat i = 0..29 {",
        '      @layers.{i}.w: f32[8, 8] = checkpoint(key="model.layers.{i}.w")',
        "    }",
        "  }",
        "  %layers.0.proj: f32[T, 8] = linear(%x, @layers.0.w)"
        "  // hf: model.layers.0 m.py:7 from: %old_0",
        "  %layers.0: f32[T, 8] = silu(%layers.0.proj)  // hf: model.layers.0 m.py:7 from: %old_0",
        "  repeat i = 1..29 {",
        "    %layers.{i}.proj: f32[T, 8] = linear(%layers.{i-1}, @layers.{i}.w)"
        "  // hf: model.layers.{i} m.py:7 from: %old_{3*i}",
        "    %layers.{i}: f32[T, 8] = silu(%layers.{i}.proj)"
        "  // hf: model.layers.{i} m.py:7 from: %old_{3*i}",
        "  }",
        "  return %layers.29",
        "}",
    ]


def test_without_origins_only_they_are_lost():
    graph = layered(4)
    bare = parse_graph(print_graph(graph, origins=False))
    assert structurally_equal(graph, bare, origins=False) is None
    assert "origins of %layers.0.proj differ" in (structurally_equal(graph, bare) or "")


@pytest.mark.parametrize(("count", "in_head"), [(8, True), (9, False)])
def test_few_plain_weights_stand_in_the_head(count, in_head):
    graph = Graph("g")
    for i in range(count):
        name = f"w{i}"
        graph.constant("checkpoint", key=name, type=TensorType("f32", (i,)), name=name)
    text = print_graph(graph)
    assert ("weights {" not in text) == in_head
    assert structurally_equal(graph, parse_graph(text)) is None


def test_comments_and_layout_mean_nothing():
    text = """
    // a note
    graph @g(%x:f32[ T ],   // the input

             @w: f32[8]) { // begins
      %y: f32[T] = neg( // hf like, but no origin
         %x )
      return %y } // done
    """
    parsed = parse_graph(text)
    expected = "graph @g(%x: f32[T], @w: f32[8]) {\n  %y: f32[T] = neg(%x)\n  return %y\n}\n"
    assert print_graph(parsed) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (1e-05, "1e-05"),
        (1e300, "1e+300"),
        (-0.0, "-0.0"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (True, "true"),
        (None, "none"),
        ('a "b"\\\n\tü', '"a \\"b\\"\\\\\\n\\tü"'),
        ("{i} // no comment", '"{i} // no comment"'),
        ((), "[]"),
        ((1, (SymDim("T", 4), None), SymDim("S", 1, -1)), "[1, [4*T, none], S-1]"),
        (OperandRef(2), "$2"),
        (-(2**63), "-9223372036854775808"),
    ],
)
def test_attributes_print_and_parse(value, text):
    assert format_attr(value) == text
    graph = Graph("g")
    # Python's equality takes 1, 1.0 and True for one: the text keeps them apart.
    x = graph.add_input("x", TensorType("f32", (SymDim("T"),)))
    node = graph.append("relu", x)
    node.attrs["probe"] = value
    line = next(line for line in print_graph(graph).splitlines() if "relu" in line)
    assert line == f"  %relu: f32[T] = relu(%x, probe={text})"
    literal = f"graph @g() {{\n weights {{ @x: f32[0] = literal(data={text}) }}\n return\n}}"
    parsed = parse_graph(literal).weight_nodes[0].attrs["data"]
    assert repr(parsed) == repr(value)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("kv<bf16>", []),
        ("kv<bf16, [1, 2, 3]>", [(1, 2, 3)]),
        ("kv<bf16, 1 x [1, 2, 3]>", [(1, 2, 3)]),
        ("kv<bf16, 2 x [1, 2, 3], [4, 5, 6]>", [(1, 2, 3), (1, 2, 3), (4, 5, 6)]),
    ],
)
def test_kv_types_parse(text, slots):
    parsed = parse_graph(f"graph @g(%kv: {text}) {{ return }}").inputs[0].type
    assert parsed == KVType("bf16", tuple(SlotShape(*slot) for slot in slots))


def test_a_default_of_another_kind_is_printed():
    graph = Graph("g")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"), 8)))
    graph.append("rms_norm", x, eps=1e-6, weight_offset=0, name="int")
    graph.append("rms_norm", x, eps=1e-6, weight_offset=0.0, name="float")
    lines = print_graph(graph).splitlines()
    assert lines[1].endswith("rms_norm(%x, eps=1e-06, weight_offset=0)")
    assert lines[2].endswith("rms_norm(%x, eps=1e-06)")
    assert structurally_equal(graph, parse_graph(print_graph(graph))) is None


BASE = CANONICAL["weights in the head"]


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("@residual", "@other", "graph names"),
        ("%x", "%z", "parameters differ"),
        ("add", "mul", "ops differ: add and mul"),
        ("add(%x, %r)", "add(%r, %x)", "operands differ"),
        ("eps=1e-05", "eps=1e-06", "attribute eps differs"),
        ("return %n, %s", "return %s, %n", "results differ"),
        ("64", "32", "types of %x differ"),
        ("  return", "  %e: bf16[T, 64] = neg(%s)\n  return", "2 and 3 nodes"),
        ("%r)\n", "%r)  // hf: m\n", "origins of %s differ"),
    ],
)
def test_the_first_difference_is_named(old, new, difference):
    changed = parse_graph(BASE.replace(old, new))
    assert difference in (structurally_equal(parse_graph(BASE), changed) or "equal")


def test_operands_that_are_left_out_stay_out():
    graph = Graph("m")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"), 4)))
    graph.outputs = [graph.append("mul", x, scalar=0.5, name="y").output]
    [node] = parse_graph(print_graph(graph)).nodes
    assert [str(value) for value in node.inputs] == ["%x"]
