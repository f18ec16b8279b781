"""The pointwise kernel in Triton's interpreter against the ops of its expression in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ir.ops.pointwise import ELEMENTWISE, POWERS, REDUCTIONS, pointwise
from octavo.ir.parser import parse_graph
from octavo.ir.types import SymDim, TensorType
from tests.rendered_kernel import rendered
from tests.tolerances import ROW_KERNEL, distance

T = SymDim("T")


def _type(text: str) -> TensorType:
    """``bf16[T, 64]``."""
    found = parse_graph(f"graph @g(%x: {text}) {{\n  return %x\n}}\n").inputs[0].type
    assert isinstance(found, TensorType)
    return found


def _drawn(tensor: TensorType, num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = tensor.sizes({"T": num_tokens})
    if tensor.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if tensor.dtype in ("i64", "i32"):
        return torch.randint(-5, 6, shape, generator=generator).to(tensor.torch_dtype)
    return (2 * torch.randn(shape, generator=generator)).to(tensor.torch_dtype)


def _exact(expr: str, operands: list[Tensor]) -> Tensor:
    """What the expression gives when no float is rounded."""
    for dtype in ("f32", "bf16", "f16"):
        expr = expr.replace(f"dtype='{dtype}'", "dtype='f64'")
    return pointwise.evaluate(
        *(x.double() if x.is_floating_point() else x for x in operands), expr=expr
    )


def _check(
    expr: str, types: list[str], num_tokens: int = 5, operands: list[Tensor] | None = None
) -> None:
    operand_types = [_type(text) for text in types]
    given = operands or [_drawn(t, num_tokens, seed) for seed, t in enumerate(operand_types)]
    assert pointwise.infer_rule is not None
    result: Any = pointwise.infer_rule(*operand_types, expr=expr)
    constants = {"expr": expr, "operands": tuple(operand_types), "result": result}
    module = rendered("pointwise", constants)
    shape = result.sizes({"T": num_tokens})
    is_float = result.torch_dtype.is_floating_point
    out = torch.full(shape, torch.nan if is_float else 1, dtype=result.torch_dtype)
    assert module.run(*given, out=out) is out
    want = _exact(expr, given)
    if is_float:
        assert distance(out, want) <= ROW_KERNEL[out.dtype]
    else:
        assert torch.equal(out, want.to(out.dtype))


X, Y, BOOL = "f32[T, 100]", "f32[T, 100]", "bool[T, 100]"
LONG, INT = "i64[T, 100]", "i32[T, 100]"
ONE_OP: list[tuple[str, list[str]]] = [
    *((f"{op}(a0, a1)", [X, Y]) for op in ("add", "sub", "mul", "div")),
    *((f"{op}(a0, scalar=1.5)", [X]) for op in ("add", "sub", "mul", "div")),
    *((f"{op}(a0, a1)", [LONG, INT]) for op in ("add", "sub", "mul")),
    ("div(a0, scalar=4)", [LONG]),
    *((f"{op}(a0)", [X]) for op in ("neg", "exp", "cos", "sin", "tanh", "sigmoid", "relu", "silu")),
    *((f"{op}(mul(a0, a0))", [X]) for op in ("sqrt", "aten.log.default", "aten.log2.default")),
    ("rsqrt(add(mul(a0, a0), scalar=0.1))", [X]),
    ("aten.reciprocal.default(add(mul(a0, a0), scalar=0.1))", [X]),
    *((f"pow(add(mul(a0, a0), scalar=0.5), scalar={power})", ["f32[T, 16]"]) for power in POWERS),
    ("gelu(a0)", [X]),
    ("gelu(a0, approximate='tanh')", [X]),
    ("softcap(a0, cap=3.0)", [X]),
    *(
        (f"gated_activation(a0, a1, activation='{a}')", [X, Y])
        for a in ("silu", "gelu_tanh", "sigmoid")
    ),
    *((f"aten.{op}.default(a0)", [X]) for op in ("abs", "exp2", "erf", "floor", "ceil", "square")),
    *((f"aten.{op}.default(a0)", [X]) for op in ("softplus", "mish", "leaky_relu", "elu")),
    ("aten.softplus.default(a0, beta=2, threshold=3)", [X]),
    ("aten.clamp.default(a0, min=-0.5, max=1)", [X]),
    ("aten.clamp.default(a0, max=1.0)", [X]),
    ("aten.clamp.default(a0, min=2.0, max=1.0)", [X]),
    ("aten.clamp_min.default(a0, min=0)", [LONG]),
    ("aten.clamp_max.default(a0, max=0.25)", [X]),
    *((f"aten.{op}.default(a0, a1)", [X, Y]) for op in ("maximum", "minimum")),
    ("aten.where.self(a0, a1, a2)", [BOOL, X, Y]),
    ("aten.masked_fill.Scalar(a0, a1, value=-inf)", [X, BOOL]),
    *((f"aten.{op}.Scalar(a0, other=0)", [LONG]) for op in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((f"aten.{op}.Tensor(a0, a1)", [INT, LONG]) for op in ("eq", "ne", "lt", "le", "gt", "ge")),
    ("aten.lt.Scalar(a0, other=0.5)", [X]),
    *((f"aten.{op}.default(a0, a1)", [BOOL, LONG]) for op in ("logical_and", "logical_or")),
    ("aten.logical_not.default(a0)", [LONG]),
    *((f"aten.{op}.Tensor(a0, a1)", [BOOL, BOOL]) for op in ("bitwise_and", "bitwise_or")),
    *((f"aten.{op}.Tensor(a0, a1)", [LONG, INT]) for op in ("bitwise_and", "bitwise_or")),
    ("aten.bitwise_not.default(a0)", [BOOL]),
    *(
        (f"cast(a0, dtype='{dtype}')", [x])
        for x in (X, LONG, INT, BOOL)
        for dtype in ("f32", "i64", "bool")
    ),
    *((f"{op}(a0, dim=[-1], keepdim=true)", [X]) for op in sorted(REDUCTIONS)),
]


@pytest.mark.parametrize(("expr", "types"), ONE_OP, ids=[expr for expr, _ in ONE_OP])
def test_each_op(expr: str, types: list[str]) -> None:
    _check(expr, types)


def test_each_op_is_tested() -> None:
    texts = " ".join(expr for expr, _ in ONE_OP)
    assert all(f"{op}(" in texts for op in ELEMENTWISE | REDUCTIONS)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 16), (5, 2501), (67, 100), (131, 64)])
def test_a_chain_rounds_once(num_tokens: int, width: int, dtype: str) -> None:
    expr = f"cast(mul(sigmoid(cast(mul(a0, a1), dtype='f32')), a2), dtype='{dtype}')"
    types = [f"{dtype}[T, {width}]", f"{dtype}[{width}]", f"{dtype}[T, 1]"]
    _check(expr, types, num_tokens)


BROADCAST = [
    ["f32[T, 3, 16]", "f32[T, 1, 16]"],
    ["f32[T, 3, 16]", "f32[3, 1]"],
    ["f32[T, 3, 16]", "f32[3, 16]"],
    ["f32[T, 3, 16]", "f32[]"],
    ["f32[T, 2, 3, 16]", "f32[T, 2, 1, 1]"],
    ["f32[T, 1]", "f32[1, 100]"],
    ["f32[T, 1]", "f32[T, 1]"],
    ["f32[2*T, 16]", "f32[16]"],
]


@pytest.mark.parametrize("types", BROADCAST, ids=str)
def test_broadcasts(types: list[str]) -> None:
    _check("add(a0, mul(a1, scalar=0.5))", types)


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
@pytest.mark.parametrize("width", [16, 100, 2501])
def test_rows_that_are_reduced(num_tokens: int, width: int) -> None:
    mean = "aten.mean.dim(mul(t0, t0), dim=[1], keepdim=true)"
    expr = f"t0 = add(a0, a1); div(t0, sqrt(add({mean}, scalar=1e-06)))"
    _check(expr, [f"f32[T, {width}]", f"f32[{width}]"], min(num_tokens, 5 if width > 100 else 200))


def test_an_exponential_over_its_sum() -> None:
    peak = "aten.amax.default(a0, dim=[-1], keepdim=true)"
    sum_ = "aten.sum.dim_IntList(t0, dim=[-1], keepdim=true)"
    _check(f"t0 = exp(sub(a0, {peak})); div(t0, {sum_})", ["f32[T, 3, 100]"])


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_strided_operands_from_the_midst_of_a_row(num_tokens: int) -> None:
    wide = _drawn(_type("bf16[T, 201]"), num_tokens, 0)
    operands = [wide[:, 1:101], wide[:, 101:].unflatten(1, (50, 2)).select(2, 1).repeat(1, 2)]
    operands.append(wide[:, 1::2])
    _check("add(mul(a0, a1), a2)", ["bf16[T, 100]"] * 3, num_tokens, operands)


def test_in_place() -> None:
    x, y = torch.randn(5, 100), torch.randn(5, 100)
    tensor = TensorType("f32", (T, 100))
    constants = {"expr": "add(a0, a1)", "operands": (tensor, tensor), "result": tensor}
    want = x + y
    rendered("pointwise", constants).run(x, y, out=y)
    assert torch.equal(y, want)


def test_nan_and_infinity_pass() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0] * 4])
    for expr in (
        "relu(a0)",
        "aten.clamp.default(a0, min=-1.0, max=1.0)",
        "tanh(a0)",
        "sigmoid(a0)",
    ):
        _check(expr, ["f32[T, 16]"], 1, [x])
    _check("aten.maximum.default(a0, a1)", ["f32[T, 16]"] * 2, 1, [x, x.flip(1)])
