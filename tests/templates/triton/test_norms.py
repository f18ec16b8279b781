"""The norm kernels in Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.types import DTYPES
from tests.rendered_kernel import rendered
from tests.tolerances import ROW_KERNEL, distance

EPS = 1e-5
# Few rows run in tiles of another height than more than 128 of them.
SHAPES = ((1, 16), (5, 16), (1, 64), (131, 64), (5, 100), (131, 100), (5, 576), (1, 896), (3, 5120))
DTYPE = ("f32", "bf16", "f16")


def _drawn(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * shape[0] + shape[-1])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def _poisoned(*shape: int, dtype: str) -> Tensor:
    return torch.full(shape, torch.nan, dtype=DTYPES[dtype])


def _constants(op: str, hidden: int, dtype: str, **more: object) -> dict[str, object]:
    base: dict[str, object] = {"hidden": hidden, "dtype": dtype, "weight_rank": 1}
    base |= {"weight_dtype": dtype, "has_bias": False, "eps": EPS}
    if op.endswith("rms_norm"):
        base |= {"weight_offset": 0.0, "round_first": False}
    return base | more


def _rms(
    x: Tensor, weight: Tensor | None, offset: float = 0.0, round_to: str | None = None
) -> Tensor:
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    if weight is None:
        return normed
    if round_to is not None:
        normed = normed.to(DTYPES[round_to]).double()
    factor = (weight + offset).double() if round_to is not None else weight.double() + offset
    return normed * factor


def _layer(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = F.layer_norm(x.double(), x.shape[-1:], eps=EPS)
    normed = normed if weight is None else normed * weight.double()
    return normed if bias is None else normed + bias.double()


def _close(got: Tensor, want: Tensor) -> None:
    assert distance(got, want) <= ROW_KERNEL[got.dtype]


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_rms_norm(rows: int, hidden: int, dtype: str) -> None:
    module = rendered("rms_norm", _constants("rms_norm", hidden, dtype))
    x, weight = _drawn(rows, hidden, dtype=dtype), _drawn(hidden, dtype=dtype)
    out = _poisoned(rows, hidden, dtype=dtype)
    assert module.run(x, weight, out=out) is out
    _close(out, _rms(x, weight))


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("weight_dtype", DTYPE)
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_variants(dtype: str, weight_dtype: str, round_first: bool, offset: float) -> None:
    given = {"weight_dtype": weight_dtype, "weight_offset": offset, "round_first": round_first}
    module = rendered("rms_norm", _constants("rms_norm", 100, dtype, **given))
    x, weight = _drawn(5, 100, dtype=dtype), _drawn(100, dtype=weight_dtype)
    out = module.run(x, weight, out=_poisoned(5, 100, dtype=dtype))
    _close(out, _rms(x, weight, offset, dtype if round_first else None))


@pytest.mark.parametrize("dtype", DTYPE)
def test_rms_norm_without_a_weight(dtype: str) -> None:
    module = rendered("rms_norm", _constants("rms_norm", 64, dtype, weight_rank=0))
    x = _drawn(5, 64, dtype=dtype)
    _close(module.run(x, out=_poisoned(5, 64, dtype=dtype)), _rms(x, None))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("weight_rank", [1, 2])
@pytest.mark.parametrize("rows", [1, 5])
def test_heads_of_a_merged_projection(op: str, weight_rank: int, rows: int) -> None:
    heads, dim = 3, 16
    merged = _drawn(rows, 5 * dim, dtype="bf16")
    x = merged[:, dim : (1 + heads) * dim].view(rows, heads, dim)
    weight = _drawn(*((heads, dim) if weight_rank == 2 else (dim,)), dtype="bf16")
    module = rendered(op, _constants(op, dim, "bf16", weight_rank=weight_rank))
    out = module.run(x, weight, out=_poisoned(rows, heads, dim, dtype="bf16"))
    _close(out, _rms(x, weight) if op == "rms_norm" else _layer(x, weight, None))


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_layer_norm(rows: int, hidden: int, dtype: str) -> None:
    module = rendered("layer_norm", _constants("layer_norm", hidden, dtype, has_bias=True))
    # A mean far from 0: a variance of sums of squares would cancel.
    x = _drawn(rows, hidden, dtype=dtype) + 8
    weight, bias = _drawn(hidden, dtype=dtype), _drawn(hidden, dtype=dtype, seed=1)
    out = module.run(x, weight, bias, out=_poisoned(rows, hidden, dtype=dtype))
    _close(out, _layer(x, weight, bias))


# No model has a bias for each head.
@pytest.mark.parametrize(
    ("weight_rank", "has_bias"), [(0, False), (0, True), (1, False), (1, True), (2, False)]
)
def test_layer_norm_variants(weight_rank: int, has_bias: bool) -> None:
    given = {"weight_rank": weight_rank, "has_bias": has_bias}
    given |= {"weight_dtype": "f32" if weight_rank else None}
    module = rendered("layer_norm", _constants("layer_norm", 16, "bf16", **given))
    x = _drawn(5, 3, 16, dtype="bf16")
    weight = _drawn(*((16,), (16,), (3, 16))[weight_rank], dtype="f32") if weight_rank else None
    bias = _drawn(16, dtype="f32" if weight_rank else "bf16", seed=1) if has_bias else None
    params = [each for each in (weight, bias) if each is not None]
    out = module.run(x, *params, out=_poisoned(5, 3, 16, dtype="bf16"))
    _close(out, _layer(x, weight, bias))


@pytest.mark.parametrize("total_is", ["fresh", "x", "residual"])
@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 100), (131, 64), (5, 576)])
def test_add_norm(op: str, rows: int, hidden: int, dtype: str, total_is: str) -> None:
    is_layer = op == "add_layer_norm"
    module = rendered(op, _constants(op, hidden, dtype, has_bias=is_layer))
    x, residual = (_drawn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 1))
    params = [_drawn(hidden, dtype=dtype, seed=seed) for seed in range(1 + is_layer)]
    sum_ = x + residual
    memory = {"fresh": _poisoned(rows, hidden, dtype=dtype), "x": x, "residual": residual}
    total, out = memory[total_is], _poisoned(rows, hidden, dtype=dtype)
    module.run(x, residual, *params, out=out, total=total)
    assert torch.equal(total, sum_)
    _close(out, _layer(sum_, *params) if is_layer else _rms(sum_, *params))


def test_add_norm_of_strided_rows() -> None:
    wide = _drawn(5, 3 * 64, dtype="bf16")
    x, residual = wide[:, 64:128], wide[:, :64]
    module = rendered("add_rms_norm", _constants("add_rms_norm", 64, "bf16", weight_rank=0))
    out, total = (_poisoned(5, 64, dtype="bf16") for _ in range(2))
    module.run(x, residual, out=out, total=total)
    assert torch.equal(total, x + residual)
    _close(out, _rms(x + residual, None))
