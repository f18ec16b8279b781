"""Look-ups, gated activation and softcap in Triton's interpreter against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.ops.elementwise import ACTIVATIONS
from octavo.ir.types import DTYPES
from tests.rendered_kernel import rendered
from tests.tolerances import ROW_KERNEL, distance

DTYPE = ("f32", "bf16", "f16")
SHAPES = ((1, 16), (5, 100), (131, 64), (67, 576), (5, 4864))


def _drawn(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * shape[0] + shape[-1])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def _poisoned(*shape: int, dtype: str) -> Tensor:
    return torch.full(shape, torch.nan, dtype=DTYPES[dtype])


def _close(got: Tensor, want: Tensor) -> None:
    assert distance(got, want) <= ROW_KERNEL[got.dtype]


def _embedding(hidden: int, dtype: str, **more: Any) -> Any:
    constants = {"hidden": hidden, "dtype": dtype, "emit_sumsq": False, "scale": None}
    return rendered("embedding", constants | more)


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 16), (5, 100), (131, 64), (3, 896)])
def test_embedding(rows: int, hidden: int, dtype: str) -> None:
    table, ids = _drawn(7, hidden, dtype=dtype), torch.randint(0, 7, (rows,))
    out = _embedding(hidden, dtype).run(ids, table, out=_poisoned(rows, hidden, dtype=dtype))
    assert torch.equal(out, table[ids])


def test_scaled_embedding() -> None:
    table, ids = _drawn(7, 64, dtype="bf16"), torch.tensor([6, 0, 3])
    out = _embedding(64, "bf16", scale=8.5).run(ids, table, out=_poisoned(3, 64, dtype="bf16"))
    _close(out, table[ids].double() * 8.5)


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65])
@pytest.mark.parametrize(("hidden", "dtype"), [(64, "bf16"), (192, "f32"), (896, "bf16")])
def test_embedding_with_sums_of_squares(rows: int, hidden: int, dtype: str) -> None:
    module = _embedding(hidden, dtype, emit_sumsq=True)
    table, ids = _drawn(7, hidden, dtype=dtype), torch.randint(0, 7, (rows,))
    sumsq = _poisoned(rows, hidden // 64, dtype="f32")
    out = module.run(ids, table, out=_poisoned(rows, hidden, dtype=dtype), sumsq=sumsq)
    assert torch.equal(out, table[ids])
    if rows <= 64:
        _close(sumsq, table[ids].double().square().unflatten(-1, (-1, 64)).sum(-1))
    else:
        assert sumsq.isnan().all(), "nobody reads them: nothing is to be written"


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 16), (5, 100), (131, 64)])
def test_gather_rows(num_rows: int, hidden: int, dtype: str) -> None:
    x = _drawn(9, 3 * hidden, dtype=dtype)[:, hidden : 2 * hidden]
    rows = torch.randint(0, 9, (num_rows,))
    module = rendered("gather_rows", {"hidden": hidden, "dtype": dtype})
    out = module.run(x, rows, out=_poisoned(num_rows, hidden, dtype=dtype))
    assert torch.equal(out, x[rows])


def _gated(width: int, dtype: str, activation: str = "silu") -> Any:
    constants = {"width": width, "dtype": dtype, "activation": activation}
    return rendered("gated_activation", constants)


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gated_activation(activation: str, dtype: str) -> None:
    gate, up = 3 * _drawn(5, 100, dtype=dtype), _drawn(5, 100, dtype=dtype, seed=1)
    out = _poisoned(5, 100, dtype=dtype)
    _gated(100, dtype, activation).run(gate, up, out=out)
    _close(out, ACTIVATIONS[activation](gate.double()) * up.double())


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gated_activation_of_halves_in_place(rows: int, width: int) -> None:
    gate, up = _drawn(rows, 2 * width, dtype="bf16").split(width, dim=1)
    want = F.silu(gate.double()) * up.double()
    out = gate.contiguous()
    _gated(width, "bf16").run(out, up, out=out)
    _close(out, want)


@pytest.mark.parametrize("rows", [1, 5])
def test_gated_activation_of_every_other_column(rows: int) -> None:
    both = _drawn(rows, 3, 32, dtype="bf16")
    gate, up = both[..., ::2], both[..., 1::2]
    out = _gated(16, "bf16").run(gate, up, out=_poisoned(rows, 3, 16, dtype="bf16"))
    _close(out, F.silu(gate.double()) * up.double())


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_far_from_0(activation: str) -> None:
    gate = torch.tensor([[-1e4, -200.0, -20.0, -1e-6, 1e-6, 20.0, 200.0, 1e4]])
    out = _poisoned(1, 8, dtype="f32")
    _gated(8, "f32", activation).run(gate, torch.ones_like(gate), out=out)
    want = ACTIVATIONS[activation](gate.double())
    # Small results keep their digits: relative to each, but for what underflows.
    assert ((out - want).abs() <= 2.0**-18 * want.abs() + 2.0**-24).all()


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 2501), (67, 100)])
def test_softcap_in_place(rows: int, width: int, dtype: str) -> None:
    x = 100 * _drawn(rows, width, dtype=dtype)
    want = 30 * torch.tanh(x.double() / 30)
    module = rendered("softcap", {"dtype": dtype, "cap": 30.0})
    module.run(x, out=x)
    _close(x, want)


def test_softcap_of_strided_rows() -> None:
    x = 100 * _drawn(5, 3 * 16, dtype="f32")[:, 16:32]
    module = rendered("softcap", {"dtype": "f32", "cap": 30.0})
    _close(module.run(x, out=_poisoned(5, 16, dtype="f32")), 30 * torch.tanh(x.double() / 30))


def test_softcap_near_0_is_the_identity() -> None:
    x = torch.logspace(-7, 1, 64)[None]
    module = rendered("softcap", {"dtype": "f32", "cap": 30.0})
    out = module.run(x, out=_poisoned(1, 64, dtype="f32"))
    want = 30 * torch.tanh(x.double() / 30)
    assert ((out - want).abs() <= 2.0**-20 * want).all()
