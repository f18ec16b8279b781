"""Coordinate descent on codes and scales: against single codes tried out, and least squares."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octavo.calibrate.gptq import GPTQOptions, gptq
from octavo.calibrate.refine import refine
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize

SCHEMES = [
    "int4<1x32, bf16>",
    "uint4<1x32, bf16, zero=u8>",
    "uint4<1x32, f16, offset=f16>",
    "int8<1x*, f32>",
    "f4e2m1<1x32, f8e8m0>",
    "nf4<1x64, f32>",
    "f8e4m3<1x*, f32>",
    "f8e4m3<64x64, f32>",
]


def _problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A weight, and the damped Hessian of inputs whose columns are strongly correlated."""
    drawn = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(400, columns, generator=drawn).double()
    x += 2 * x[:, :1] + x.roll(1, 1)
    hessian = x.T @ x
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    return torch.randn(rows, columns, generator=drawn), hessian


def _cost(weight: Tensor, made: QuantTensor, hessian: Tensor) -> Tensor:
    gaps = weight.double() - made.dequantize().double()
    return ((gaps @ hessian) * gaps).sum(1)


@pytest.mark.parametrize("text", SCHEMES)
def test_the_error_falls_with_every_sweep(text: str) -> None:
    weight, hessian = _problem(40, 128)
    made = quantize(weight, QuantScheme.parse(text))
    costs = [_cost(weight, made, hessian)]
    for sweeps in (1, 2, 4):
        better = refine(weight, hessian, made, sweeps)
        better.check()
        costs.append(_cost(weight, better, hessian))
    for before, after in itertools.pairwise(costs):
        assert bool((after <= before * (1 + 1e-6)).all())
    assert costs[1].sum() < 0.8 * costs[0].sum()


@pytest.mark.parametrize("text", ["int4<1x32, bf16>", "uint4<1x32, f16, offset=f16>"])
def test_it_leaves_less_error_than_gptq(text: str) -> None:
    weight, hessian = _problem(64, 256)
    scheme = QuantScheme.parse(text)
    plain = gptq(weight, hessian, scheme, GPTQOptions(sweeps=0))
    found = gptq(weight, hessian, scheme)
    assert _cost(weight, found, hessian).sum() < _cost(weight, plain, hessian).sum()


def test_no_single_code_could_be_better_in_the_end() -> None:
    weight, hessian = _problem(6, 64)
    made = refine(weight, hessian, quantize(weight, QuantScheme.parse("int4<1x32, f32>")), 50)
    least = _cost(weight, made, hessian)
    for column in range(64):
        for code in range(-8, 8):
            codes = made.codes.clone()
            codes[:, column] = code
            other = QuantTensor(made.scheme, codes, made.scales)
            assert bool((_cost(weight, other, hessian) >= least * (1 - 1e-6)).all())


def test_scales_are_those_of_least_squares() -> None:
    """One group a row and codes that stay: the scale is a projection in the metric of H."""
    weight, hessian = _problem(5, 64)
    made = refine(weight, hessian, quantize(weight, QuantScheme.parse("int8<1x*, f32>")), 50)
    codes = made.codes.double()
    along = codes @ hessian
    expected = (along * weight.double()).sum(1) / (along * codes).sum(1)
    torch.testing.assert_close(made.scales[:, 0].double(), expected, rtol=1e-6, atol=0)


def test_scales_that_rows_share_stay() -> None:
    weight, hessian = _problem(64, 128)
    start = quantize(weight, QuantScheme.parse("f8e4m3<64x64, f32>"))
    made = refine(weight, hessian, start, 2)
    assert made.scales.equal(start.scales)
    assert not made.codes.view(torch.uint8).equal(start.codes.view(torch.uint8))
