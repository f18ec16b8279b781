"""Fused ops equal the ops they stand for, in float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ir.errors import VerifyError
from octavo.ir.ops.fused import embedding_sumsq, fused_linear
from octavo.ir.types import SymDim, TensorType

T = SymDim("T")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_norm_gate_and_residual_in_their_order() -> None:
    x, weight, bias, residual = draw(5, 64), draw(12, 64), draw(12), draw(5, 6)
    got = fused_linear.evaluate(
        x, weight, bias, residual, norm_eps=1e-5, activation="silu", cap=2.0
    )
    normed = torch.nn.functional.rms_norm(x, (64,), eps=1e-5)
    wide = normed @ weight.T + bias
    gated = torch.nn.functional.silu(wide[:, :6]) * wide[:, 6:]
    torch.testing.assert_close(got, torch.tanh(gated / 2) * 2 + residual)


def test_sumsq_is_of_the_rounded_result() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(128, 32).bfloat16()
    total, sumsq = fused_linear.evaluate(x, weight, emit_sumsq=True)
    expected = torch.stack(
        [total[:, :64].float().pow(2).sum(1), total[:, 64:].float().pow(2).sum(1)]
    )
    torch.testing.assert_close(sumsq, expected.T)


def test_embedding_gives_its_sumsq() -> None:
    table, ids = draw(7, 128), torch.tensor([3, 0, 3])
    rows, sumsq = embedding_sumsq.evaluate(ids, table)
    assert torch.equal(rows, table[ids])
    torch.testing.assert_close(sumsq.sum(1), table[ids].float().pow(2).sum(1))


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        ((12, 32), {}, "is not K"),
        ((12, 64), {"activation": "swish"}, "no gated"),
        ((11, 64), {"activation": "silu"}, "no gated"),
        ((12, 64), {"emit_sumsq": True}, "multiple of 64"),
    ],
)
def test_what_does_not_fit_is_refused(
    weight: tuple[int, int], options: dict[str, object], message: str
) -> None:
    assert fused_linear.infer_rule is not None
    with pytest.raises(VerifyError, match=message):
        fused_linear.infer_rule(TensorType("f32", (T, 64)), TensorType("f32", weight), **options)
