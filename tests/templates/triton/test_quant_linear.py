"""Linears of quantised weights, in Triton's interpreter, against float64.

What is expected is the product with the dequantised matrix, which the kernels hold exactly, but for
ways that round x to 8 bits: there it is the product with the rounded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.codegen.quant_layouts import find_layout
from octavo.codegen.triton_layouts import TritonLayout
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.ir.types import DTYPES
from octavo.runtime.kernel import Workspace, recording
from tests.linear_kernels import PLAIN, check_sumsq, product, sumsq, workspace_on
from tests.linear_kernels import VARIANTS as AROUND
from tests.rendered_kernel import arch_here, rendered
from tests.tolerances import LINEAR_KERNEL, distance

ROWS = (1, 5, 17, 123)
INT4, FP8, INT8 = "int4<1x128, bf16>", "f8e4m3<1x*, f32, x=f8e4m3>", "int8<1x*, f32, x=i8>"
SCHEMES = [
    INT4,
    "int4<1x64, f16>",
    "int4<1x32, f16>",
    "int4<1x64, f32>",
    "int4<1x*, f32>",
    "uint4<1x128, f16, zero=u8>",
    "uint4<1x32, bf16, zero=u8>",
    "uint4<1x32, f16, offset=f16>",
    "f4e2m1<1x32, f8e8m0>",
    FP8,
    "f8e4m3<*x*, f32, x=f8e4m3>",
    "f8e4m3<1x*, bf16>",
    "f8e4m3<128x128, f32, x=f8e4m3/128>",
    INT8,
    "int8<1x32, f16>",
    "int6<1x16, f32>",
    "uint5<1x32, f32, offset=f32>",
]
VARIANTS: dict[str, dict[str, Any]] = {
    **AROUND,
    "gated": {**AROUND["gated"], "sums_one_row": True},
    "all": {
        "norm_eps": 1e-5,
        "has_bias": True,
        "activation": "gelu_tanh",
        "softcap": 5.0,
        "has_residual": True,
    },
}


@cache
def _module(scheme: str, n: int, k: int, **more: Any) -> ModuleType:
    layout = TritonLayout.of(QuantScheme.parse(scheme), n, k)
    constants = {"k": k, "n": n, "sums_one_row": False} | PLAIN | more
    constants |= layout.constants(constants["dtype"], constants["out_dtype"])
    return rendered("linear", constants, "quant_linear")


@dataclass(frozen=True)
class Case:
    """Random operands of a module, and what has to come out, with x whole and with x rounded."""

    module: ModuleType
    operands: list[Tensor]
    buffers: dict[str, Tensor]
    whole: Tensor
    rounded: Tensor | None

    def check(self, how: str | None = None) -> None:
        """Run it as its module has chosen; compare result, sums of squares and counters."""
        out = self.buffers["out"]
        workspace = workspace_on(out.device)
        constants = self.module.CONSTANTS
        got = self.module.run(*self.operands, **self.buffers, workspace=workspace)
        assert got is out
        chosen = self.module.CHOICES.for_rows(len(out))["how"]
        assert how in (None, chosen)
        want = self.rounded if chosen in ("tiled", "scaled") else self.whole
        assert want is not None
        assert distance(out, want) <= LINEAR_KERNEL[out.dtype]
        if "sumsq_out" in self.buffers:
            check_sumsq(out, self.buffers["sumsq_out"], 2 if constants["has_gemv"] else 1)
        assert not workspace.counters.any()


def _case(module: ModuleType, rows: int, *, seed: int = 0, stride: int | None = None) -> Case:
    constants = module.CONSTANTS
    k, n = constants["k"], constants["n"]
    width = n // 2 if constants["activation"] else n
    dtype, out_dtype = DTYPES[constants["dtype"]], DTYPES[constants["out_dtype"]]
    draw = torch.Generator().manual_seed(1000 * rows + n + seed)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    x = drawn(rows, stride or k)[:, :k]
    scheme = QuantScheme.parse(constants["scheme"])
    matrix = quantize(drawn(n, k, dtype=torch.float32) / k**0.5, scheme, search=False)
    around = {}
    if constants["has_bias"]:
        around["bias"] = drawn(n)
    if constants["has_residual"]:
        around["residual"] = drawn(rows, width, dtype=out_dtype)
    whole, rounded = _expected(constants, x, matrix, **around)
    out = around.get("residual", torch.full((rows, width), torch.nan, dtype=out_dtype))
    operands = [x, *TritonLayout.of(scheme, n, k).pack(matrix).values(), *around.values()]
    if constants["takes_sumsq"]:
        unread = torch.full((rows, k // 64), torch.nan)
        first = 1 if constants["sums_one_row"] else 2
        operands.append(sumsq(x).float() if first <= rows <= 64 else unread)
    return Case(module, operands, _buffers(module, rows, out), whole, rounded)


def _buffers(module: ModuleType, rows: int, out: Tensor) -> dict[str, Tensor]:
    constants = module.CONSTANTS
    dtype, wanted = DTYPES[constants["dtype"]], module.run.__annotations__
    shapes = {"normed": (rows, constants["k"]), "wide": (rows, constants["n"])}
    buffers = {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in shapes.items()
        if name in wanted
    }
    if "sumsq_out" in wanted:
        buffers["sumsq_out"] = torch.full((rows, out.shape[1] // 64), torch.nan)
    if "rounded" in wanted:
        span = constants["pieces"] * constants["piece"]
        width = -(-constants["k"] // span) * span
        x_dtype = DTYPES[constants["x_codes"]]
        buffers["rounded"] = torch.zeros(rows, width, dtype=torch.uint8).view(x_dtype)
        num_scales = width // constants["x_block"] if constants["x_block"] else 1
        buffers["row_scales"] = torch.full((rows, num_scales), torch.nan)
    return {"out": out, **buffers}


def _expected(
    constants: dict[str, Any],
    x: Tensor,
    matrix: QuantTensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result by x as it is, and by its rows rounded to 8 bits if the scheme permits that."""
    wide, norm = x.double(), torch.ones(len(x), 1, dtype=torch.float64)
    if constants["norm_eps"] is not None:
        norm = (wide.pow(2).mean(-1, keepdim=True) + constants["norm_eps"]).rsqrt()
    rounded = _rounded_rows(x, matrix.scheme)
    found = [
        product(constants, norm * each, matrix.dequantize().double(), bias, residual)
        for each in (wide, rounded)
        if each is not None
    ]
    return found[0], found[1] if len(found) > 1 else None


def _rounded_rows(x: Tensor, scheme: QuantScheme) -> Tensor | None:
    """x in 8 bits, with a scale for each row or block: codes are of x before its norm, which is
    one factor of them all."""
    if scheme.x is None:
        return None
    block, k = scheme.x_block or x.shape[1], x.shape[1]
    blocks = F.pad(x.float(), (0, -k % block)).view(len(x), -1, block)
    largest = {"i8": 127, "f8e4m3": 448}[scheme.x]
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=1e-30) / largest
    codes = blocks / scales
    codes = codes.round() if scheme.x == "i8" else codes.to(torch.float8_e4m3fn)
    return (codes.double() * scales.double()).view(len(x), -1)[:, :k]


def _check_every_way(module: ModuleType, rows: int) -> None:
    """The first candidate of each kind."""
    bucket, done = module.CHOICES.bucket(rows), set()
    try:
        for candidate in bucket.candidates:
            if candidate["how"] not in done:
                done.add(candidate["how"])
                module.CHOICES.choose(bucket.name, candidate)
                _case(module, rows).check(candidate["how"])
    finally:
        module.CHOICES.reset(arch_here())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, rows: int) -> None:
    _check_every_way(_module(scheme, 66, 384), rows)


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
@pytest.mark.parametrize("scheme", [INT4, FP8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, scheme: str, rows: int) -> None:
    _check_every_way(_module(scheme, 128, 128, **VARIANTS[variant]), rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_dtypes(scheme: str, dtype: str, rows: int) -> None:
    _check_every_way(_module(scheme, 16, 128, dtype=dtype, out_dtype=dtype), rows)


@pytest.mark.parametrize("rows", [1, 5, 65])
@pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [
        ("int4<1x32, f16>", 1, 32),
        ("int4<1x32, f16>", 3, 96),
        ("uint4<1x32, f16, zero=u8>", 33, 160),
        (INT4, 65, 896),
        (INT4, 16, 4864),
        (FP8, 1, 7),
        (FP8, 130, 100),
        (INT8, 5, 1001),
        ("f8e4m3<128x128, f32, x=f8e4m3/128>", 300, 200),
        ("int8<1x32, f16>", 5, 96),
    ],
)
def test_odd_shapes(scheme: str, n: int, k: int, rows: int) -> None:
    _check_every_way(_module(scheme, n, k), rows)


@pytest.mark.parametrize("scheme", [FP8, INT8])
@pytest.mark.parametrize("k", [1025, 14336])
def test_long_rows(scheme: str, k: int) -> None:
    _check_every_way(_module(scheme, 12, k, norm_eps=1e-5, activation="silu", has_bias=True), 1)


@pytest.mark.parametrize("rows", [1, 3, 65, 129])
@pytest.mark.parametrize("scheme", [INT4, FP8])
def test_rows_at_a_stride(scheme: str, rows: int) -> None:
    module = _module(scheme, 64, 128, norm_eps=1e-5)
    _case(module, rows, stride=200).check()


@pytest.mark.parametrize("scheme", [INT4, FP8])
@pytest.mark.parametrize("variant", ["emit", "gated"])
def test_every_candidate(variant: str, scheme: str) -> None:
    module = _module(scheme, 64, 1024, **VARIANTS[variant])
    done: list[dict[str, Any]] = []
    try:
        for bucket in module.CHOICES.buckets:
            for candidate in bucket.candidates:
                if candidate not in done and (bucket.max_rows or 257) <= 256:
                    module.CHOICES.choose(bucket.name, candidate)
                    _case(module, bucket.max_rows // 2 + 1).check()
                    done.append(candidate)
    finally:
        module.CHOICES.reset(arch_here())


@pytest.mark.parametrize("rows", [64, 130])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "scheme", [each for each in SCHEMES if "4<1x" in each and "x*" not in each]
)
def test_numbers_scaled_before_the_product(scheme: str, dtype: str, rows: int) -> None:
    module = _module(scheme, 64, 256, dtype=dtype, out_dtype=dtype)
    bucket = module.CHOICES.bucket(rows)
    scaled = next(each for each in bucket.candidates if each.get("SCALED"))
    module.CHOICES.choose(bucket.name, scaled)
    try:
        _case(module, rows).check("skinny")
    finally:
        module.CHOICES.reset(arch_here())


def test_splits_of_k_give_the_same_result_each_time() -> None:
    module = _module("int4<1x32, bf16>", 64, 1152, **VARIANTS["emit"])
    assert module.CHOICES.for_rows(3)["SPLIT"] > 1
    first, second = _case(module, 3), _case(module, 3)
    first.check()
    second.check()
    assert torch.equal(first.buffers["out"], second.buffers["out"])


def test_rows_of_zeros_are_not_divided_by() -> None:
    for scheme in (FP8, INT8, "f8e4m3<128x128, f32, x=f8e4m3/128>"):
        case = _case(_module(scheme, 64, 256), 65)
        case.operands[0].zero_()
        out = case.module.run(
            *case.operands, **case.buffers, workspace=workspace_on(case.whole.device)
        )
        assert not out.any()


def test_few_binaries_do_for_all_sizes() -> None:
    module = _module(INT4, 6144, 4096, norm_eps=1e-5, takes_sumsq=True)
    workspace = Workspace.allocate("meta")
    kinds = TritonLayout.of(QuantScheme.parse(INT4), 6144, 4096).shapes().values()
    parts = [torch.empty(shape, dtype=DTYPES[dtype], device="meta") for dtype, shape in kinds]
    with recording() as launches:
        for rows in (*range(1, 66, 3), 128, 2000, 5000):
            x, out = (torch.empty(rows, w, device="meta").bfloat16() for w in (4096, 6144))
            sumsq, normed = torch.empty(rows, 64, device="meta"), torch.empty_like(x)
            module.run(x, *parts, sumsq, out=out, normed=normed, workspace=workspace)
    names = sorted({launch.identity: launch.kernel.name for launch in launches}.values())
    wide = ["wide"] if arch_here() == 90 else []
    assert names == ["dequantize", "row_norm", *["skinny"] * 5, *wide]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(1, 128), (130, 384), (256, 896), (5, 1152)])
def test_packing_loses_nothing(scheme: str, n: int, k: int) -> None:
    matrix = quantize(torch.randn(n, k), QuantScheme.parse(scheme), search=False)
    layout = TritonLayout.of(matrix.scheme, n, k)
    packed = layout.pack(matrix)
    assert {name: (part.dtype, part.shape) for name, part in packed.items()} == {
        name: (DTYPES[dtype], shape) for name, (dtype, shape) in layout.shapes().items()
    }
    found = layout.unpack(packed)
    found.check()
    for (part, one), (_, other) in zip(found.parts(), matrix.parts(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), part


def test_the_layout_is_known_by_its_name() -> None:
    matrix = quantize(torch.randn(4, 256), QuantScheme.parse(INT4))
    packed = find_layout("triton").pack(matrix)
    # Code i of word j of a row is column 64 i + j.
    words = packed["codes"].int() & 0xFFFF
    assert words.shape == (1, 4, 64)
    nibbles = torch.stack([words[0] >> 4 * i & 15 for i in range(4)], dim=1).flatten(1)
    assert torch.equal(nibbles.int() - 8, matrix.codes.int())


def test_cost_counts_the_packed_weight_once() -> None:
    cost = _module(INT4, 64, 256, has_residual=True).cost(3)
    assert cost.bytes == 64 * 256 // 2 + 64 * 2 * 2 + 3 * 2 * (256 + 64 + 64)
    assert cost.flops == 2 * 3 * 64 * 256
