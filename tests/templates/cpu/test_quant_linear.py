"""The linears of the cpu target with quantised weights, against products in float64.

The weights are dequantised here, from the formula of docs/quantization.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.codegen.cpu_rules import quant_kernel
from octavo.codegen.quant_layouts import find_layout
from octavo.codegen.render import render_kernel
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.ir.types import DTYPES
from tests.dense_matrix import dense
from tests.rendered_kernel import imported

# How far the largest difference may be from the largest result: exact sums of f32, and of bf16.
EXACT, ROUNDED = 2e-6, 2**-7
# Where zeros or offsets are rounded to bf16 as well, which may be as large as the largest values.
SHIFTED = 2**-6

SCHEMES = {
    "int8<1x*, f32>": EXACT,
    "int8<*x*, f32>": EXACT,
    "int8<1x*, f32, x=i8>": 2e-4,  # x in 15 bits of its largest element
    "int4<1x32, f32>": ROUNDED,
    "int4<1x64, bf16>": ROUNDED,
    "uint4<1x32, f16, zero=u8>": SHIFTED,
    "uint4<1x32, f16, offset=f16>": SHIFTED,
    "uint4<1x32, f16>": SHIFTED,
    "int8<1x32, f16>": ROUNDED,
    "int8<1x16, f16>": EXACT,
    "int6<1x16, f16>": EXACT,
    "uint5<1x32, f16, offset=f16>": EXACT,
    "uint8<1x32, f16, zero=u8>": EXACT,
    "int4<1x16, f32>": EXACT,
    "f8e4m3<*x*, f32>": EXACT,
    "f8e4m3<1x*, f32, x=f8e4m3>": EXACT,
    "f8e4m3<128x128, f32, x=f8e4m3/128>": EXACT,
    "f4e2m1<1x32, f8e8m0>": EXACT,
    "nf4<1x64, f32>": EXACT,
}
ANY_K = ("int8<1x*, f32>", "int8<*x*, f32>", "f8e4m3<1x*, f32, x=f8e4m3>", "f8e4m3<*x*, f32>")


def run(matrix: QuantTensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    n, k = matrix.shape
    dtype = "bf16" if x.dtype == torch.bfloat16 else "f32"
    template, layout = quant_kernel(matrix.scheme)
    constants = {
        "k": k,
        "n": n,
        "dtype": dtype,
        "scheme": matrix.scheme,
        "has_bias": bias is not None,
    }
    module = imported(template, render_kernel(f"cpu/{template}.py.j2", "linear", constants))
    weight = module.prepare(*find_layout(layout).pack(matrix).values())
    out = torch.full((*x.shape[:-1], n), torch.nan, dtype=DTYPES[dtype])
    with torch.inference_mode():
        return module.run(x, weight, *([] if bias is None else [bias]), out=out)


def check(got: Tensor, x: Tensor, matrix: QuantTensor, bias: Tensor | None, limit: float) -> None:
    want = x.double() @ dense(matrix).t()
    if bias is not None:
        want = want + bias.double()
    if got.dtype == torch.bfloat16:
        limit = max(limit, ROUNDED)
    gap = (got.double() - want).abs().max() / want.abs().max()
    assert gap <= limit, f"{matrix.scheme}: differs by {gap:.2e} of the largest"


def sample(text: str, n: int, k: int, rows: int, seed: int = 0) -> tuple[QuantTensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    matrix = quantize(torch.randn(n, k, generator=drawn), QuantScheme.parse(text), search=False)
    x = torch.randn(rows, k, generator=drawn)
    x[:, 0] *= 30  # outliers, as activations have them
    return matrix, x


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 5, 123])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_scheme(scheme: str, rows: int, dtype: str) -> None:
    matrix, x = sample(scheme, 160, 192, rows)
    x = x.to(DTYPES[dtype])
    check(run(matrix, x), x, matrix, None, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", [1, 5, 123])
def test_any_number_of_columns_and_a_bias(scheme: str, n: int) -> None:
    matrix, x = sample(scheme, n, 64, 3)
    bias = torch.linspace(-3, 3, n)
    check(run(matrix, x, bias), x, matrix, bias, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ANY_K)
@pytest.mark.parametrize("k", [1, 5, 123])
@pytest.mark.parametrize("rows", [1, 40])
def test_any_k_where_a_row_has_one_scale(scheme: str, k: int, rows: int) -> None:
    matrix, x = sample(scheme, 24, k, rows)
    check(run(matrix, x), x, matrix, None, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ["int8<1x*, f32>", "int4<1x32, f32>", "int8<1x32, f16>"])
def test_many_rows_of_a_large_weight_come_in_pieces(scheme: str) -> None:
    matrix, x = sample(scheme, 2500, 1024, 50)
    check(run(matrix, x), x, matrix, None, SCHEMES[scheme])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    matrix, x = sample("int8<1x*, f32>", 96, 64, 9)
    alone = torch.cat([run(matrix, row[None]) for row in x])
    assert torch.equal(run(matrix, x), alone)


def test_a_row_of_zeros_gives_zeros_and_a_nan_is_not_lost() -> None:
    matrix, x = sample("int8<1x*, f32>", 96, 64, 3)
    x[0] = 0
    x[1, 5] = torch.nan
    got = run(matrix, x)
    assert torch.equal(got[0], torch.zeros(96))
    assert bool(got[1].isnan().all())
    assert bool(got[2].isfinite().all())


def test_inputs_of_three_dims() -> None:
    for scheme in ("int8<1x*, f32>", "int4<1x32, f32>", "nf4<1x64, f32>"):
        matrix, x = sample(scheme, 48, 64, 6)
        assert torch.equal(run(matrix, x.view(2, 3, 64)).view(6, 48), run(matrix, x))


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_packed_codes_are_found_again_on_every_processor(tmp_path: Path, capability: str) -> None:
    matrix, x = sample("uint4<1x32, f16, offset=f16>", 100, 64, 40)
    constants = {"k": 64, "n": 100, "dtype": "f32", "scheme": matrix.scheme, "has_bias": False}
    text = render_kernel("cpu/quant_linear_int4.py.j2", "linear", constants)
    (tmp_path / "kernel.py").write_text(text, "utf-8")
    parts = find_layout("nibbles").pack(matrix)
    torch.save([x, *parts.values()], tmp_path / "given.pt")
    code = (
        "import kernel, torch; x, *parts = torch.load('given.pt'); weight = kernel.prepare(*parts);"
        "torch.save(kernel.run(x, weight, out=torch.empty(40, 100)), 'got.pt')"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    run_python = [sys.executable, "-c", code]
    subprocess.run(run_python, cwd=tmp_path, env=environment, check=True)
    scheme = str(matrix.scheme)
    check(torch.load(tmp_path / "got.pt"), x, matrix, None, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ["int8<1x*, f32>", "int8<1x32, f16>"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_of_a_quantised_table(scheme: str, dtype: str) -> None:
    matrix, _ = sample(scheme, 50, 96, 1)
    text = render_kernel(
        "cpu/quant_embedding.py.j2",
        "quant_embedding",
        {"k": 96, "n": 50, "scheme": matrix.scheme},
    )
    ids = torch.tensor([49, 0, 7, 7])
    out = torch.empty(4, 96, dtype=DTYPES[dtype])
    imported("quant_embedding", text).run(ids, matrix.codes, matrix.scales, out=out)
    assert torch.equal(out, dense(matrix)[ids].float().to(out.dtype))
