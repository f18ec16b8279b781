"""Weights are written once each, in shards, and only if they are numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from octavo.codegen.weights import write_weights
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.ir.random_inputs import RandomSource
from octavo.ir.types import SymDim, TensorType
from octavo.ir.weight_cache import WeightCache
from tests.codegen.llama import llama


def read(folder: Path) -> dict[str, Tensor]:
    weight_map = json.loads((folder / "index.json").read_text("utf-8"))["weight_map"]
    found = {}
    for name, shard in weight_map.items():
        with safe_open(folder / shard, framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


def test_all_used_weights_are_written_and_no_others(tmp_path: Path) -> None:
    graph = llama(layers=2)
    unused = TensorType("f32", (3,))
    graph.constant("checkpoint", key="unused", type=unused, name="unused")
    source = RandomSource(graph)
    num_bytes = write_weights(graph, source, tmp_path)
    written = read(tmp_path)
    cache = WeightCache(graph, source)
    assert list(written) == sorted(value.name for value in graph.used_weights())
    for value in graph.used_weights():
        assert torch.equal(written[value.name], cache.get(value))
    assert num_bytes == sum(t.numel() * t.element_size() for t in written.values())


def test_shards_stay_below_their_bound(tmp_path: Path) -> None:
    graph = llama(layers=2)
    largest = max(value.tensor.num_bytes({}) for value in graph.used_weights())
    write_weights(graph, RandomSource(graph), tmp_path, shard_bytes=largest)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == "00001.safetensors"
    assert max(shard.stat().st_size for shard in shards) < largest + 4096  # the shard's header
    assert set(read(tmp_path)) == {value.name for value in graph.used_weights()}


@pytest.mark.parametrize(("bad", "kind"), [(torch.nan, "a NaN"), (-torch.inf, "an infinity")])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_weights_that_are_not_finite_are_refused_by_name(
    bad: float, kind: str, dtype: str, tmp_path: Path
) -> None:
    graph = llama(layers=2, dtype=dtype)

    class Damaged(RandomSource):
        def load(self, key: str) -> Tensor:
            tensor = super().load(key)
            if key == "model.layers.1.mlp.down_proj.weight":
                tensor[3, 5] = bad
            return tensor

    with pytest.raises(OctavoError, match=rf"layers\.1\.mlp\.down_proj\.weight holds {kind}"):
        write_weights(graph, Damaged(graph), tmp_path)


def test_pieces_of_one_tensor_are_written_apart(tmp_path: Path) -> None:
    graph = Graph("pieces")
    x = graph.add_input("x", TensorType("f32", (SymDim("T"), 4)))
    whole = graph.constant("checkpoint", key="w", type=TensorType("f32", (4, 6)), name="w")
    turned = graph.constant("transpose", whole, dim0=0, dim1=1, name="turned")
    half = graph.constant("slice", turned, dim=0, start=0, end=3, name="half")
    both = [graph.append("linear", x, weight).output for weight in (turned, half)]
    graph.outputs = both
    source = RandomSource(graph)
    write_weights(graph, source, tmp_path)
    assert torch.equal(read(tmp_path)["half"], source.load("w").t()[:3])
    assert torch.equal(read(tmp_path)["turned"], source.load("w").t())


def test_progress_counts_weights(tmp_path: Path) -> None:
    graph = llama(layers=2)
    seen: list[tuple[int, int]] = []
    write_weights(
        graph,
        RandomSource(graph),
        tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = len(graph.used_weights())
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_without_a_checkpoint_its_weights_are_shapes_and_tables_are_real(tmp_path: Path) -> None:
    graph = Graph("g")
    shape = TensorType("bf16", (4, 3))
    weight = graph.constant("checkpoint", key="w", type=shape, name="w")
    folded = graph.constant("mul", weight, scalar=2.0, name="folded")
    table = graph.constant("iota", n=5, name="table")
    x = graph.add_input("x", TensorType("bf16", (SymDim("T"), 3)))
    ids = graph.add_input("ids", TensorType("i64", (SymDim("T"),)))
    y = graph.append("linear", x, folded).output
    z = graph.append("embedding", ids, graph.constant("reshape", table, shape=(5, 1))).output
    graph.outputs = [y, z]

    class Nothing:
        def load(self, key: str) -> Tensor:
            raise AssertionError(f"{key} was read")

        buffer = load

    num_bytes = write_weights(graph, Nothing(), tmp_path, without_checkpoint=True)
    index = json.loads((tmp_path / "index.json").read_text("utf-8"))
    assert index["shapes"] == {"folded": ["bfloat16", [4, 3]]}
    [written] = read(tmp_path).values()
    assert torch.equal(written, torch.arange(5)[:, None])
    assert num_bytes == 5 * 8


QUANTISED = """graph @m(%x: f32[T, 64]) {
  weights {
    @a: f32[8, 64] = checkpoint(key="a")
    @q: uint4<1x32, f16, zero=u8>[8, 64] = quantize(@a, scheme="uint4<1x32, f16, zero=u8>")
    @c: int4<1x*, f32>[3, 64] = quantized_checkpoint(key="c", scheme="int4<1x*, f32>", shape=[3, 64])
  }
  %y: f32[T, 8] = linear(%x, @q)
  %z: f32[T, 3] = linear(%x, @c)
  return %y, %z
}
"""  # noqa: E501


def test_a_quantised_weight_is_written_in_parts(tmp_path: Path) -> None:
    graph = parse_graph(QUANTISED)
    source = RandomSource(graph)
    layouts = {graph.value("@q"): "nibbles", graph.value("@c"): "plain"}
    write_weights(graph, source, tmp_path, layouts=layouts)
    written = read(tmp_path)
    assert sorted(written) == ["c.codes", "c.scales", "q.codes", "q.scales", "q.zeros"]
    held = source.load_quantized("c")
    assert torch.equal(written["c.codes"], held.codes)
    assert torch.equal(written["c.scales"], held.scales)
    rounded = quantize(source.load("a"), QuantScheme.parse("uint4<1x32, f16, zero=u8>"))
    lower, upper = rounded.codes[:, ::2], rounded.codes[:, 1::2]
    assert torch.equal(written["q.codes"], lower + 16 * upper)
    assert torch.equal(written["q.zeros"], rounded.zeros)


def test_the_parts_of_a_quantised_weight_are_declared_without_it(tmp_path: Path) -> None:
    graph = parse_graph(QUANTISED)
    layouts = {graph.value("@q"): "nibbles", graph.value("@c"): "plain"}
    write_weights(graph, RandomSource(graph), tmp_path, layouts=layouts, without_checkpoint=True)
    index = json.loads((tmp_path / "index.json").read_text("utf-8"))
    assert index["weight_map"] == {}
    assert index["shapes"] == {
        "c.codes": ["int8", [3, 64]],
        "c.scales": ["float32", [3, 1]],
        "q.codes": ["uint8", [8, 32]],
        "q.scales": ["float16", [8, 2]],
        "q.zeros": ["uint8", [8, 2]],
    }


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    graph = parse_graph(QUANTISED)

    class Damaged(RandomSource):
        def load_quantized(self, key: str) -> QuantTensor:
            matrix = super().load_quantized(key)
            matrix.scales[1] = torch.nan
            return matrix

    layouts = {graph.value("@q"): "nibbles", graph.value("@c"): "plain"}
    with pytest.raises(OctavoError, match=r"c\.scales holds a NaN"):
        write_weights(graph, Damaged(graph), tmp_path, layouts=layouts)
