"""Quantised matrices in graphs: types, sources, and what a linear with one means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ir.errors import OctavoError, ParseError, VerifyError
from octavo.ir.interpret import interpret
from octavo.ir.parser import parse_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.random_inputs import RandomSource, random_inputs
from octavo.ir.types import QuantType
from octavo.ir.verify import verify

SCHEME = QuantScheme.parse("uint4<1x2, f32, zero=u8>")
LINEAR = """graph @m(%x: f32[T, 4]) {
  weights {
    @a: uint4<1x2, f32, zero=u8>[2, 4] = quantized_checkpoint(key="a", scheme="uint4<1x2, f32, zero=u8>", shape=[2, 4])
    @b: uint4<1x2, f32, zero=u8>[1, 4] = quantized(key="b", scheme="uint4<1x2, f32, zero=u8>", shape=[1, 4])
    @w: uint4<1x2, f32, zero=u8>[3, 4] = concat_rows(@a, @b)
    @d: f32[3, 4] = dequantize(@w, dtype="f32")
  }
  %y: f32[T, 3] = linear(%x, @w)
  %z: f32[T, 3] = linear(%x, @d)
  return %y, %z
}
"""  # noqa: E501


class Source:
    """Two matrices written out."""

    def load(self, key: str) -> Tensor:
        raise KeyError(key)

    buffer = load

    def load_quantized(self, key: str) -> QuantTensor:
        codes = {"a": [[0, 1, 2, 3], [15, 14, 13, 12]], "b": [[8, 8, 8, 9]]}[key]
        scales = {"a": [[1.0, 0.5], [2.0, 0.25]], "b": [[1.0, 4.0]]}[key]
        zeros = {"a": [[0, 2], [8, 12]], "b": [[8, 7]]}[key]
        return QuantTensor(
            SCHEME,
            torch.tensor(codes, dtype=torch.uint8),
            torch.tensor(scales),
            torch.tensor(zeros, dtype=torch.uint8),
        )


def test_a_linear_multiplies_by_what_the_codes_stand_for() -> None:
    graph = parse_graph(LINEAR)
    verify(graph)
    x = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    y, z = interpret(graph, {"x": x}, Source())
    # (code - zero) * scale: [0 1 0 .5], [14 12 .25 0], [0 0 4 8].
    assert isinstance(y, Tensor)
    assert y.tolist() == [[510.0, 159.0, 8400.0]]
    assert isinstance(z, Tensor)
    assert z.tolist() == y.tolist()


def test_random_sources_make_quantised_matrices() -> None:
    graph = parse_graph(LINEAR)
    source = RandomSource(graph)
    matrix = source.load_quantized("a")
    matrix.check()
    assert (matrix.scheme, matrix.shape) == (SCHEME, (2, 4))
    assert torch.equal(matrix.codes, RandomSource(graph).load_quantized("a").codes)
    y, z = interpret(graph, random_inputs(graph), source)
    assert isinstance(y, Tensor)
    assert isinstance(z, Tensor)
    assert torch.equal(y, z)
    with pytest.raises(KeyError):
        source.load_quantized("c")


def test_a_matrix_of_another_scheme_or_shape_is_refused() -> None:
    text = LINEAR.replace("shape=[2, 4]", "shape=[4, 4]").replace("[2, 4]", "[4, 4]")
    graph = parse_graph(text.replace("[3, 4]", "[5, 4]").replace("[T, 3]", "[T, 5]"))
    with pytest.raises(VerifyError, match=r"@a.*expected uint4<.*>\[4, 4\].*got uint4<.*>\[2, 4\]"):
        interpret(graph, {"x": torch.zeros(1, 4)}, Source())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int3<1x4, f32>[2, 4]", "is no quantisation scheme"),
        ("int4<1x4, f99>[2, 4]", "f99 is none of the dtypes"),
        ("int4<1x4, f32, x=i4>[2, 4]", "x= is i8 or f8e4m3"),
        ("int4<1x0, f32>[2, 4]", "at least one row and one column"),
        ("int4<1x4, f32, x=i8/0>[2, 4]", "at least one row and one column"),
        ("int8<1x4, i64>[2, 4]", "scales and offsets are floats, not i64"),
        ("uint4<1x4, f32, offset=u8>[2, 4]", "scales and offsets are floats, not u8"),
        ("uint4<1x4, f32, zero=f32>[2, 4]", "the zero= of uint4 is u8, as its codes are"),
        ("uint4<1x4, f32, zero=i8>[2, 4]", "the zero= of uint4 is u8"),
        ("int4<1x4, f32, zero=u8>[2, 4]", "the zero= of int4 is i8"),
        (
            "nf4<1x4, f32, zero=u8>[2, 4]",
            "codes of nf4 are floats .*no zero= and no offset=; .*uint4",
        ),
        ("f4e2m1<1x4, f32, offset=f32>[2, 4]", "codes of f4e2m1 are floats"),
        ("f8e4m3<1x4, f32, zero=i8>[2, 4]", "codes of f8e4m3 are floats .*choose .*uint8"),
        ("uint4<1x4, f32, zero=u8, zero=u8>[2, 4]", "each once"),
        ("int8<1x4, f32, x=i8, x=f8e4m3>[2, 4]", "each once"),
        ("uint4<1x4, f32, zero=u8, offset=f32>[2, 4]", "has zero= or offset="),
        ("int4<1x4, f32>[4]", "two sizes, N and K"),
        ("int4<1x4, f32>[T, 4]", "expected a size"),
        ("int4<1x4, f32", "expected `>`, got the end"),
    ],
)
def test_errors_in_a_type_point_at_it(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        parse_graph(f"graph @m() {{\n  weights {{\n    @a: {text}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('quantize(@f, scheme="int4<1x3, f32>")', "K=4 is not a multiple of the group of 3"),
        ("neg(@q)", "neg does not take the quantised"),
        ("concat_rows(@q, @p)", "schemes differ"),
        ("concat_rows(@c, @c)", "end inside a block"),
        ('dequantize(@f, dtype="f32")', "no f32 matrix of f32"),
    ],
)
def test_ops_refuse_what_does_not_fit(line: str, reason: str) -> None:
    made = "\n".join(
        f'    @{name}: {scheme}[2, 4] = quantized(key="{name}", scheme="{scheme}", shape=[2, 4])'
        for name, scheme in [
            ("q", "int4<1x4, f32>"),
            ("p", "int4<1x2, f32>"),
            ("c", "int4<*x4, f32>"),
        ]
    )
    head = 'graph @m() {\n  weights {\n    @f: f32[2, 4] = checkpoint(key="f")\n'
    text = f"{head}{made}\n    @y: f32[1] = {line}\n"
    with pytest.raises(OctavoError, match=reason):
        parse_graph(text)


def test_a_quantised_matrix_is_no_parameter() -> None:
    graph = parse_graph("graph @m(%x: int4<1x4, f32>[2, 4]) {\n  return %x\n}\n")
    with pytest.raises(VerifyError, match="a quantised matrix is a weight"):
        verify(graph)


def test_the_bytes_of_a_packed_matrix() -> None:
    # 4-bit codes, two-byte scales, one-byte zeros.
    scheme = QuantScheme.parse("uint4<1x32, f16, zero=u8>")
    assert QuantType(scheme, (8, 64)).num_bytes == 8 * 64 // 2 + 8 * 2 * (2 + 1)
