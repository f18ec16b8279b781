"""Schemes, and rounding to nearest, against the definitions of the formats in float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ir.errors import VerifyError
from octavo.ir.quant_scheme import CODE_FORMATS, QuantScheme
from octavo.ir.quant_tensor import QuantTensor, concat_rows, quantize, round_to_codes

SCHEMES = [
    "int8<1x*, f32, x=i8>",
    "int4<1x32, bf16>",
    "uint4<1x64, bf16, zero=u8>",
    "uint4<1x32, f16, offset=f16>",
    "f8e4m3<*x*, f32, x=f8e4m3>",
    "f8e4m3<1x*, f32, x=f8e4m3>",
    "f8e4m3<128x128, f32, x=f8e4m3/128>",
    "f4e2m1<1x32, f8e8m0>",
    "nf4<1x64, f32>",
]


@pytest.mark.parametrize("text", SCHEMES)
def test_a_scheme_is_read_as_it_is_written(text: str) -> None:
    assert str(QuantScheme.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "int4", "int4<1x32>", "int3<1x32, bf16>", "int4<1x32, bf16, y=i8>"]
)
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(VerifyError):
        QuantScheme.parse(text)


def test_values_are_code_less_zero_times_scale_plus_offset() -> None:
    codes = torch.tensor([[0, 1, 14, 15], [3, 4, 5, 6]], dtype=torch.uint8)
    scheme = QuantScheme.parse("uint4<1x2, f32, zero=u8>")
    scales = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    zeros = torch.tensor([[1, 15], [3, 0]], dtype=torch.uint8)
    held = QuantTensor(scheme, codes, scales, zeros)
    held.check()
    assert held.dequantize().tolist() == [[-1.0, 0.0, -2.0, 0.0], [0.0, 0.5, 20.0, 24.0]]
    scheme = QuantScheme.parse("uint4<1x2, f32, offset=f32>")
    held = QuantTensor(scheme, codes, scales, offsets=torch.tensor([[0.25, -1.0], [0.0, 8.0]]))
    assert held.dequantize().tolist() == [[0.25, 1.25, 27.0, 29.0], [1.5, 2.0, 28.0, 32.0]]


def test_tables_hold_the_values_of_their_specifications() -> None:
    e2m1 = CODE_FORMATS["f4e2m1"].table
    # Sign, two bits of exponent with bias 1, one of mantissa: OCP MX 1.0, section 5.3.3.
    for code, value in enumerate(e2m1):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert value == (-magnitude if code & 8 else magnitude)
    assert len(CODE_FORMATS["nf4"].table) == 16
    assert torch.arange(16).equal(torch.tensor(CODE_FORMATS["nf4"].table).argsort())


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("text", SCHEMES)
def test_each_code_is_the_nearest_to_its_value(text: str, search: bool) -> None:
    scheme = QuantScheme.parse(text)
    matrix = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    matrix[3] = 0
    made = quantize(matrix, scheme, search=search)
    made.check()
    if scheme.codes.startswith("f8"):
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        every = every[torch.isfinite(every.float())]
    else:
        form = scheme.format
        every = torch.arange(16) if form.table else torch.arange(form.low, form.high + 1)
        every = every.to(made.codes.dtype)
    nearest = torch.full((130, 256), torch.inf, dtype=torch.float64)
    for code in every:
        other = QuantTensor(scheme, code.repeat(130, 256), made.scales, made.zeros, made.offsets)
        error = (other.dequantize().double() - matrix.double()).abs()
        nearest = torch.minimum(nearest, error)
    # Where two codes are as near but for the last bit of f32, either will do.
    slack = 1e-6 * matrix.abs().max().double()
    assert bool(((made.dequantize().double() - matrix.double()).abs() <= nearest + slack).all())


@pytest.mark.parametrize("text", SCHEMES)
def test_the_search_never_adds_to_the_error(text: str) -> None:
    scheme = QuantScheme.parse(text)
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) ** 3
    weights = torch.rand(256, generator=torch.Generator().manual_seed(3))

    def error(search: bool) -> float:
        made = quantize(matrix, scheme, importance=weights, search=search)
        return float(((made.dequantize() - matrix).double().square() * weights).sum())

    assert error(True) <= error(False)
    if "4<1x" in text:
        assert error(True) < 0.97 * error(False)


def test_zeros_quantise_to_zeros() -> None:
    for text in SCHEMES:
        held = quantize(torch.zeros(128, 128), QuantScheme.parse(text))
        assert not bool(held.dequantize().any()), text


def test_a_group_that_does_not_divide_k_is_refused() -> None:
    with pytest.raises(VerifyError, match="K=96 is not a multiple of the group of 64"):
        quantize(torch.ones(4, 96), QuantScheme.parse("int4<1x64, bf16>"))
    quantize(torch.ones(130, 96), QuantScheme.parse("f8e4m3<128x128, f32>")).check()


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(VerifyError, match="NaN"):
        quantize(torch.tensor([[1.0, torch.nan]]), QuantScheme.parse("int8<1x*, f32>"))


def test_rows_are_stacked_where_no_block_is_cut() -> None:
    scheme = QuantScheme.parse("f8e4m3<128x128, f32>")
    matrix = torch.randn(256 + 64, 128, generator=torch.Generator().manual_seed(4))
    parts = [quantize(part, scheme) for part in matrix.split([256, 64])]
    assert concat_rows(parts).dequantize().equal(quantize(matrix, scheme).dequantize())
    with pytest.raises(VerifyError, match="inside a block"):
        concat_rows(parts[::-1])
    with pytest.raises(VerifyError, match="differ"):
        concat_rows([parts[0], quantize(matrix, QuantScheme.parse("int8<1x*, f32>"))])


def test_bytes_are_those_of_codes_and_scales() -> None:
    assert (
        QuantScheme.parse("int4<1x128, bf16>").num_bytes(4096, 4096)
        == 4096 * 4096 // 2 + 4096 * 32 * 2
    )
    assert QuantScheme.parse("int8<1x*, f32>").num_bytes(3, 5) == 15 + 12
    assert QuantScheme.parse("f8e4m3<128x128, f32>").num_bytes(130, 128) == 130 * 128 + 2 * 4


def test_ties_and_overflow_of_codes() -> None:
    scheme = QuantScheme.parse("int4<1x4, f32>")
    assert round_to_codes(torch.tensor([[-99.0, 0.5, 1.5, 99.0]]), scheme).tolist() == [
        [-8, 0, 2, 7]
    ]
    scheme = QuantScheme.parse("f8e4m3<1x*, f32>")
    assert round_to_codes(torch.tensor([[1e9, -1e9]]), scheme).float().tolist() == [[448.0, -448.0]]
