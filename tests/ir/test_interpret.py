"""The oracle: right numbers, and no result that is not of its declared type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.interpret import WeightCache, interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph

MLP = """graph @mlp(%x: f32[T, 8], %y: f32[2*T+1, 8]) {
  weights {
    @gate: f32[6, 8] = checkpoint(key="m.gate")
    @up: f32[6, 8] = checkpoint(key="m.up")
    @both: f32[12, 8] = concat(@gate, @up, dim=0)
    @scale: f32[6] = buffer(key="m.scale")
  }
  %h: f32[T, 12] = linear(%x, @both)
  %g: f32[T, 6], %u: f32[T, 6] = split(%h, sizes=[6, 6], dim=1)
  %a: f32[T, 6] = gated_activation(%g, %u, activation="silu")
  %s: f32[T, 6] = mul(%a, @scale)
  %f: f32[6*T] = reshape(%s, shape=[6*T])
  return %f, @up, %f
}
"""


class Source:
    """Fixed tensors, and a record of what was asked for."""

    def __init__(self, **changes: Tensor) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tensors = {
            "m.gate": torch.randn(6, 8, generator=drawn),
            "m.up": torch.randn(6, 8, generator=drawn),
            "m.scale": torch.randn(6, generator=drawn),
            **{key.replace("_", "."): value for key, value in changes.items()},
        }
        self.loads: list[str] = []

    def load(self, key: str) -> Tensor:
        self.loads.append(key)
        return self.tensors[key]

    def buffer(self, key: str) -> Tensor:
        return self.load(key)


def inputs(tokens: int = 5) -> dict[str, Tensor | KVState]:
    drawn = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(tokens, 8, generator=drawn),
        "y": torch.randn(2 * tokens + 1, 8, generator=drawn),
    }


@pytest.mark.parametrize("tokens", [0, 1, 5, 123])
def test_a_graph_computes_what_pytorch_computes(tokens):
    source, given = Source(), inputs(tokens)
    x = given["x"]
    gate, up, scale = source.tensors.values()
    expected = (F.silu(x @ gate.T) * (x @ up.T) * scale).flatten()
    result = interpret(parse_graph(MLP), given, source)
    torch.testing.assert_close(result[0], expected)
    assert torch.equal(result[1], up)
    assert result[2] is result[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(5, 9)}, r"%x: expected f32\[T, 8\] at T=5, got f32\[5, 9\]"),
        ({"x": torch.zeros(5, 8, 1)}, r"%x: expected f32\[T, 8\], got f32\[5, 8, 1\]"),
        (
            {"x": torch.zeros(5, 8, dtype=torch.int64)},
            r"%x: expected f32\[T, 8\] .* got i64\[5, 8\]",
        ),
        ({"y": torch.zeros(10, 8)}, r"%y: dim 0 is 10, which is no value of 2\*T\+1"),
        ({"y": torch.zeros(9, 8)}, r"%y: dim 0 is 9, so T would be 4; an earlier input has T=5"),
        ({"x": None}, r"%x: expected f32\[T, 8\] .*, got NoneType"),
        ({"z": torch.zeros(1)}, r"@mlp takes the inputs \['x', 'y'\], got \['x', 'y', 'z'\]"),
    ],
)
def test_wrong_inputs_are_named(changes, message):
    with pytest.raises(VerifyError, match=message):
        interpret(parse_graph(MLP), {**inputs(), **changes}, Source())


def test_missing_inputs_are_named():
    with pytest.raises(VerifyError, match=r"takes the inputs \['x', 'y'\], got \['x'\]"):
        interpret(parse_graph(MLP), {"x": torch.zeros(5, 8)}, Source())


def test_a_result_of_another_type_than_declared_is_an_error():
    graph = parse_graph(MLP)
    graph.value("%s").type = graph.value("%s").tensor.with_dtype("bf16")
    with pytest.raises(
        VerifyError, match=r"%s = mul\(...\): expected bf16\[T, 6\] at T=5, got f32"
    ):
        interpret(graph, inputs(), Source())


def test_a_node_that_fails_is_named():
    text = (
        "graph @g(%i: i64[T], @t: f32[4, 2]) {\n %y: f32[T, 2] = gather_rows(@t, %i)\n return %y\n}"
    )
    source = Source(t=torch.zeros(4, 2))
    with pytest.raises(VerifyError, match=r"%y = gather_rows\(@t, %i\) fails: .*out of range"):
        interpret(parse_graph(text), {"i": torch.tensor([4])}, source)


def test_a_symbol_that_no_input_has_is_an_error():
    graph = parse_graph("graph @g(%x: f32[T]) {\n %y: f32[T] = neg(%x)\n return %y\n}")
    graph.value("%y").type = parse_graph("graph @g(%x: f32[R]) {return}").inputs[0].type
    with pytest.raises(VerifyError, match=r"%y: no input has the symbol 'R' of f32\[R\]"):
        interpret(graph, {"x": torch.zeros(3)}, Source())


def test_observers_see_every_node_of_the_step():
    seen = {}
    interpret(
        parse_graph(MLP),
        inputs(),
        Source(),
        observe=lambda node, results: seen.update(
            zip(map(str, node.outputs), results, strict=True)
        ),
    )
    assert list(seen) == ["%h", "%g", "%u", "%a", "%s", "%f"]
    torch.testing.assert_close(seen["%a"], F.silu(seen["%g"]) * seen["%u"])


def test_values_are_freed_after_their_last_use():
    import weakref

    graph = parse_graph(
        "graph @g(%x: f32[T]) {\n %a: f32[T] = neg(%x)\n %b: f32[T] = neg(%a)\n"
        " %dead: f32[T] = exp(%b)\n %c: f32[T] = neg(%b)\n return %c\n}"
    )
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    def observe(node, results):
        alive.append(weakref.ref(results[0]))
        counts.append(sum(ref() is not None for ref in alive))

    interpret(graph, {"x": torch.zeros(4)}, Source(), observe=observe)
    assert counts == [1, 2, 2, 2]


def test_checkpoint_tensors_are_cast_and_checked():
    graph = parse_graph(MLP)
    wide = Source(m_gate=torch.ones(6, 8, dtype=torch.float64))
    cache = WeightCache(graph, wide)
    assert cache.get(graph.value("@gate")).dtype == torch.float32
    with pytest.raises(
        VerifyError, match=r"@gate: the checkpoint's 'm.gate' has the shape \[8, 6\]"
    ):
        WeightCache(graph, Source(m_gate=torch.ones(8, 6))).get(graph.value("@gate"))


def test_buffers_are_taken_as_they_are():
    graph = parse_graph(MLP)
    cache = WeightCache(graph, Source(m_scale=torch.ones(6, dtype=torch.bfloat16)))
    with pytest.raises(VerifyError, match=r"@scale = buffer\(...\): expected f32\[6\]"):
        cache.get(graph.value("@scale"))


def test_weights_are_computed_once_and_only_when_asked_for():
    graph, source = parse_graph(MLP), Source()
    cache = WeightCache(graph, source)
    both = cache.get(graph.value("@both"))
    assert cache.get(graph.value("@both")) is both
    assert source.loads == ["m.gate", "m.up"]


def test_the_memory_bound_holds():
    graph, source = parse_graph(MLP), Source()
    # Room for @both (384 bytes) but not for its parts (192 each) besides.
    cache = WeightCache(graph, source, limit_bytes=400)
    both = cache.get(graph.value("@both"))
    assert cache.get(graph.value("@both")) is both
    cache.get(graph.value("@gate"))
    assert source.loads == ["m.gate", "m.up", "m.gate"]
    assert cache.get(graph.value("@both")) is not both  # it had to go for @gate
    tiny = WeightCache(graph, source, limit_bytes=0)
    assert torch.equal(tiny.get(graph.value("@both")), both)


def test_a_kv_state_is_checked_and_written_in_place():
    text = """graph @g(%k: f32[T, 2, 8], %slots: i64[T], %kv: kv<f32, 1 x [2, 8, 8]>) {
      %kv~1: kv<f32, 1 x [2, 8, 8]> = kv_write(%kv, %k, %k, %slots, slot=0)
      return %kv~1
    }"""
    graph = parse_graph(text)
    state = KVState.empty(graph.inputs[2].type, num_blocks=3, block_size=4)
    given = {"k": torch.ones(2, 2, 8), "slots": torch.tensor([5, 11]), "kv": state}
    (result,) = interpret(graph, given, Source())
    written = ~result.keys[0].isnan().any(-1).any(-1)
    assert written.nonzero().tolist() == [[1, 1], [2, 3]]
    assert state.keys[0] is result.keys[0]
    wrong = KVState((torch.zeros(3, 4, 2, 9),), (torch.zeros(3, 4, 2, 8),))
    with pytest.raises(VerifyError, match=r"%kv: expected kv<f32, 1 x \[2, 8, 8\]>"):
        interpret(graph, {**given, "kv": wrong}, Source())
