"""The text of pointwise expressions: read, printed, refused; and evaluated by the ops it names."""

from __future__ import annotations

import pytest
import torch

from octavo.ir.errors import VerifyError
from octavo.ir.ops import infer_types
from octavo.ir.ops.pointwise import pointwise
from octavo.ir.pointwise_expr import Call, Expression, parse_expression
from octavo.ir.types import SymDim, TensorType

T = SymDim("T")


@pytest.mark.parametrize(
    "text",
    [
        "neg(a0)",
        "mul(sigmoid(a0), cast(a1, dtype='f32'))",
        "t0 = add(a0, a1); t1 = tanh(t0); mul(t0, mul(t1, t1))",
        "aten.mean.dim(a0, dim=[-1], keepdim=true)",
        "aten.masked_fill.Scalar(a0, a1, value=-inf)",
        "softcap(add(a0, scalar=-1.5e-07), cap=30.0)",
        "gelu(a10, approximate='tanh')",
        "aten.clamp.default(a0, min=none, max=7)",
    ],
)
def test_text_survives_reading_and_printing(text: str) -> None:
    assert str(parse_expression(text)) == text


def test_what_is_read() -> None:
    total = Call("add", ("a0", "a1"))
    result = Call("mul", ("t0", Call("pow", ("t0",), (("scalar", 2),))))
    want = Expression((("t0", total),), result)
    assert parse_expression("t0=add( a0,a1 ) ; mul(t0, pow(t0, scalar=2))") == want


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "the end"),
        ("a0", "the end"),
        ("add(a0, a1", "the end"),
        ("add(a0 a1)", "a1)"),
        ("add(a0, b)", "b)"),
        ("add(a0) neg(a0)", "neg(a0)"),
        ("t0 = neg(a0)", "the end"),
        ("add(a0, scalar=)", ")"),
        ("add(a0, scalar=%)", "%)"),
        ("neg(a0,, a1)", ", a1)"),
    ],
)
def test_a_text_that_is_none_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(VerifyError) as error:
        parse_expression(text)
    assert str(error.value).endswith(f"at `{place}`")


def test_names_that_stand_for_nothing_are_refused() -> None:
    x = TensorType("f32", (T, 64))
    for text in ("neg(a1)", "add(a0, t0)", "t0 = neg(t0); neg(t0)"):
        with pytest.raises(VerifyError, match="stands for nothing"):
            infer_types("pointwise", [x], {"expr": text})


def test_the_type_is_that_of_the_ops() -> None:
    x, y = TensorType("bf16", (T, 64)), TensorType("f32", (T, 1))
    assert infer_types("pointwise", [x, y], {"expr": "mul(a0, a1)"}) == (
        TensorType("f32", (T, 64)),
    )
    with pytest.raises(VerifyError, match="unknown op"):
        infer_types("pointwise", [x], {"expr": "frobnicate(a0)"})
    with pytest.raises(VerifyError, match="no attribute"):
        infer_types("pointwise", [x], {"expr": "neg(a0, scalar=1)"})


def test_evaluation_rounds_after_each_op() -> None:
    x, y = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    got = pointwise.evaluate(x, y, expr="t0 = mul(a0, a1); add(t0, sigmoid(t0))")
    product = x * y
    assert torch.equal(got, product + torch.sigmoid(product))
