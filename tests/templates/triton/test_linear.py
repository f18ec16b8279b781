"""Linears and what is fused around them, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ir.ops.elementwise import ACTIVATIONS
from octavo.ir.types import DTYPES
from octavo.runtime.kernel import Workspace, recording
from tests.linear_kernels import PLAIN, check_sumsq, product, sumsq, workspace_on
from tests.linear_kernels import VARIANTS as AROUND
from tests.rendered_kernel import arch_here, rendered
from tests.tolerances import LINEAR_KERNEL, distance

ROWS = (1, 2, 5, 17, 64, 65, 123)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    **AROUND,
    "gated with bias": {"activation": "gelu_tanh", "has_bias": True, "norm_eps": 1e-6},
    "softcap": {"softcap": 5.0},
    "all": {
        "norm_eps": 1e-5,
        "has_bias": True,
        "activation": "silu",
        "softcap": 5.0,
        "has_residual": True,
    },
}


@cache
def _module(k: int, n: int, **more: Any) -> ModuleType:
    return rendered("linear", {"k": k, "n": n} | PLAIN | more)


@dataclass(frozen=True)
class Case:
    """Random operands of a module, and what has to come out."""

    module: ModuleType
    operands: dict[str, Tensor]
    buffers: dict[str, Tensor]
    want: Tensor

    def check(self) -> None:
        """Run it, and compare the result, the sums of squares and the counters."""
        constants = self.module.CONSTANTS
        out = self.buffers["out"]
        workspace = workspace_on(out.device)
        got = self.module.run(**self.operands, **self.buffers, workspace=workspace)
        assert got is out
        assert distance(out, self.want) <= LINEAR_KERNEL[out.dtype]
        if constants["emit_sumsq"]:
            check_sumsq(out, self.buffers["sumsq_out"])
        assert not workspace.counters.any()


def _case(
    module: ModuleType, rows: int, *, stride: int | None = None, in_place: bool = True
) -> Case:
    constants = module.CONSTANTS
    k, n = constants["k"], constants["n"]
    width = n // 2 if constants["activation"] else n
    dtype, out_dtype = DTYPES[constants["dtype"]], DTYPES[constants["out_dtype"]]
    draw = torch.Generator().manual_seed(1000 * rows + n)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    x = drawn(rows, stride or k)[:, :k]
    operands = {"x": x, "weight": (drawn(n, k).double() / k**0.5).to(dtype)}
    if constants["has_bias"]:
        operands["bias"] = drawn(n)
    if constants["has_residual"]:
        operands["residual"] = drawn(rows, width, dtype=out_dtype)
    want = _expected(constants, **operands)
    out = torch.full((rows, width), torch.nan, dtype=out_dtype)
    if constants["has_residual"] and in_place:
        out = operands["residual"]
    if constants["takes_sumsq"]:
        unread = torch.full((rows, k // 64), torch.nan)
        operands["sumsq"] = sumsq(x).float() if 2 <= rows <= 64 else unread
    return Case(module, operands, _buffers(constants, rows, out), want)


def _buffers(constants: dict[str, Any], rows: int, out: Tensor) -> dict[str, Tensor]:
    dtype = DTYPES[constants["dtype"]]
    buffers = {"out": out}
    if constants["emit_sumsq"]:
        buffers["sumsq_out"] = torch.full((rows, out.shape[1] // 64), torch.nan)
    if constants["norm_eps"] is not None:
        buffers["normed"] = torch.full((rows, constants["k"]), torch.nan, dtype=dtype)
    if constants["activation"]:
        buffers["wide"] = torch.full((rows, constants["n"]), torch.nan, dtype=dtype)
    return buffers


def _expected(
    constants: dict[str, Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    x = x.double()
    if constants["norm_eps"] is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + constants["norm_eps"]).sqrt()
    return product(constants, x, weight.double(), bias, residual)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, rows: int) -> None:
    _case(_module(192, 128, **VARIANTS[variant]), rows).check()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("k", "n"), [(64, 96), (100, 130), (576, 1), (7, 3), (1, 1)])
def test_shapes(k: int, n: int, dtype: str, rows: int) -> None:
    _case(_module(k, n, dtype=dtype, out_dtype=dtype), rows).check()


@pytest.mark.parametrize("rows", [1, 5, 65])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("variant", ["gated", "emit", "capped residual"])
def test_variants_in_other_dtypes(variant: str, dtype: str, rows: int) -> None:
    _case(_module(192, 128, dtype=dtype, out_dtype=dtype, **VARIANTS[variant]), rows).check()


@pytest.mark.parametrize("rows", ROWS)
def test_f32_results_of_bf16(rows: int) -> None:
    _case(_module(100, 130, out_dtype="f32"), rows).check()
    _case(_module(64, 130, out_dtype="f32", has_residual=True), rows).check()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(activation: str) -> None:
    module = _module(64, 64, activation=activation, softcap=5.0)
    for rows in (1, 3, 65):
        _case(module, rows).check()


@pytest.mark.parametrize("rows", [1, 3, 65])
def test_residual_that_is_not_the_result(rows: int) -> None:
    case = _case(_module(64, 128, **VARIANTS["emit"]), rows, in_place=False)
    residual = case.operands["residual"].clone()
    case.check()
    assert torch.equal(case.operands["residual"], residual)


@pytest.mark.parametrize("rows", [1, 3, 65, 129])
@pytest.mark.parametrize("stride", [192, 100])
def test_rows_at_a_stride(stride: int, rows: int) -> None:
    """At 100 elements rows are not 16-byte aligned, as TMA would want them."""
    for more in ({}, {"out_dtype": "f32"}, VARIANTS["norm"]):
        _case(_module(64, 96, **more), rows, stride=stride).check()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("k", [1000, 1025, 4864, 7168, 20000])
def test_long_rows(k: int, rows: int) -> None:
    """In one piece or three, with the last reaching past the end or not; k cut among programs."""
    more = {"norm_eps": 1e-5, "activation": "silu", "has_bias": True}
    _case(_module(k, 12, **more), rows).check()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_too_long_for_registers(dtype: str) -> None:
    more = VARIANTS["all"] | {"dtype": dtype, "out_dtype": dtype}
    _case(_module(40001, 6, **more), 1).check()


@pytest.mark.parametrize("variant", ["plain", "sumsq", "emit", "gated", "capped residual"])
def test_every_candidate(variant: str) -> None:
    module = _module(320, 128, **VARIANTS[variant])
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


def test_splits_of_k_give_the_same_result_each_time() -> None:
    module = _module(1100, 64, **VARIANTS["emit"])
    assert module.CHOICES.for_rows(3)["SPLIT"] > 1
    first, second = _case(module, 3), _case(module, 3)
    first.check()
    second.check()
    assert torch.equal(first.buffers["out"], second.buffers["out"])


def test_a_batch_of_rows_is_flat() -> None:
    module = _module(64, 96, **VARIANTS["norm"])
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    out, normed = torch.empty(2, 3, 96).bfloat16(), torch.empty(2, 3, 64).bfloat16()
    got = module.run(x, weight, out=out, normed=normed, workspace=workspace_on(out.device))
    assert got is out
    assert distance(out, _expected(module.CONSTANTS, x, weight)) <= LINEAR_KERNEL[out.dtype]


def test_few_binaries_do_for_all_sizes() -> None:
    module = _module(4096, 6144, **VARIANTS["sumsq"])
    workspace = Workspace.allocate("meta")
    weight, bias = (
        torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((6144, 4096), 6144)
    )
    with recording() as launches:
        for rows in (*range(1, 66, 3), 128, 129, 5000):
            x, out = (torch.empty(rows, w, device="meta").bfloat16() for w in (4096, 6144))
            sumsq, normed = torch.empty(rows, 64, device="meta"), torch.empty_like(x)
            buffers = {"out": out, "normed": normed, "workspace": workspace}
            module.run(x, weight, bias, sumsq, **buffers)
    names = sorted({launch.identity: launch.kernel.name for launch in launches}.values())
    assert names == ["gemv", "row_norm", "skinny", "skinny", "skinny"]


@pytest.mark.parametrize("most", [1, 4, 16, 64])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (14336, 4096), (4864, 896), (4096, 128256)])
def test_default_tables_fit_every_gpu(k: int, n: int, most: int) -> None:
    """In 99 KiB of shared memory (sm_89), the scratch memory and the counters."""
    tile = _module(k, n).CHOICES.for_rows(most)
    if tile["how"] == "gemv":
        assert tile["BN"] * k <= 256 * 32 * tile["num_warps"]
        return
    tiles = -(-n // tile["BN"])
    assert 2 * tile["num_stages"] * (tile["BN"] + tile["BM"]) * tile["BK"] <= 99 * 1024
    assert tile["SPLIT"] == 1 or tiles * tile["SPLIT"] * tile["BN"] * tile["BM"] <= 2**24
    assert tile["SPLIT"] == 1 or tiles <= 2**16


def test_cost_counts_the_weight_once() -> None:
    cost = _module(64, 96, has_residual=True).cost(3)
    assert cost.bytes == 2 * (96 * 64 + 3 * (64 + 96 + 96))
    assert cost.flops == 2 * 3 * 96 * 64
