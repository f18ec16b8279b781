"""ATen calls that have a meaning in the IR, one small function each.

A rule returns the value or values of its call, or None to leave the call to PyTorch. A rule whose
op refuses the operands (VerifyError), or infers other types than the trace saw, is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.frontend.aten_call import AtenCall
from octavo.frontend.aten_shape_rules import SHAPE_RULES
from octavo.ir.graph import Value
from octavo.ir.types import DTYPE_NAMES

Rule = Callable[[AtenCall], Value | Sequence[Value] | None]


def _same(call: AtenCall) -> Value | None:
    """A copy, a detached alias, a dropout that is off: the value itself."""
    return call.tensor("input" if "input" in call.arguments else "self")


def _cast(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    dtype = DTYPE_NAMES[call.node.meta["val"].dtype]
    return x if dtype == x.dtype else call.emit("cast", x, dtype=dtype)


def _dropout(call: AtenCall) -> Value | None:
    return None if call["train"] and call["p"] else call.tensor("input")


def _unary(op: str) -> Rule:
    return lambda call: call.emit(op, call.tensor("self"))


def _gelu(call: AtenCall) -> Value | None:
    return call.emit("gelu", call.tensor("self"), approximate=call["approximate"])


def _binary(op: str, commutes: bool = False) -> Rule:
    def rule(call: AtenCall) -> Value | None:
        if call.arguments.get("alpha", 1) != 1:
            return _scaled(call, op)
        if not call.is_tensor("self"):
            return _with_scalar(call, op, "other", "self") if commutes else None
        return _with_scalar(call, op, "self", "other")

    return rule


def _second(call: AtenCall) -> str:
    return "exponent" if "exponent" in call.arguments else "other"


def _with_scalar(call: AtenCall, op: str, first: str, second: str) -> Value | None:
    if call.is_tensor(second):
        return call.emit(op, call.tensor(first), call.tensor(second))
    number = call[second]
    if not isinstance(number, int | float):
        return None
    return call.emit(op, call.tensor(first), scalar=number)


def _scaled(call: AtenCall, op: str) -> Value | None:
    """``x + alpha * y``."""
    if not call.is_tensor("self"):
        return None
    if not call.is_tensor("other"):
        return call.emit(op, call.tensor("self"), scalar=call["alpha"] * call["other"])
    scaled = call.emit("mul", call.tensor("other"), scalar=call["alpha"])
    return call.emit(op, call.tensor("self"), scaled)


def _reversed_sub(call: AtenCall) -> Value | None:
    """``y - x``: exactly ``-x + y`` for a number y."""
    if call["alpha"] != 1:
        return None
    if call.is_tensor("other"):
        return call.emit("sub", call.tensor("other"), call.tensor("self"))
    return call.emit("add", call.emit("neg", call.tensor("self")), scalar=call["other"])


def _power(call: AtenCall) -> Value | None:
    return _with_scalar(call, "pow", "self", "exponent") if call.is_tensor("self") else None


def _linear(call: AtenCall) -> Value | None:
    return call.emit("linear", call.tensor("input"), call.tensor("weight"), call.optional("bias"))


def _addmm(call: AtenCall) -> Value | None:
    """``bias + x @ w``, as GPT-2's Conv1D has it: w is ``[K, N]``."""
    bias, weight = call.tensor("self"), call.tensor("mat2")
    if (call["alpha"], call["beta"]) != (1, 1) or bias.tensor.rank != 1:
        return None
    turned = call.emit("transpose", weight, dim0=0, dim1=1)
    return call.emit("linear", call.tensor("mat1"), turned, bias)


def _matmul(call: AtenCall) -> Value | None:
    other = "mat2" if "mat2" in call.arguments else "other"
    return call.emit("matmul", call.tensor("self"), call.tensor(other))


def _embedding(call: AtenCall) -> Value | None:
    return call.emit("embedding", call.tensor("indices"), call.tensor("weight"))


def _layer_norm(call: AtenCall) -> Value | None:
    if len(call["normalized_shape"]) != 1:
        return None
    weight, bias = call.optional("weight"), call.optional("bias")
    return call.emit("layer_norm", call.tensor("input"), weight, bias, eps=call["eps"])


def _rms_norm(call: AtenCall) -> Value | None:
    if len(call["normalized_shape"]) != 1 or call["eps"] is None:
        return None
    return call.emit("rms_norm", call.tensor("input"), call.optional("weight"), eps=call["eps"])


def _attention(call: AtenCall) -> Value | None:
    attrs = {name: call[name] for name in ("scale", "causal", "window", "chunk", "softcap")}
    q, k, v = (call.tensor(name) for name in "qkv")
    return call.emit("attention", q, k, v, call.optional("sinks"), **attrs)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            "aten.alias.default",
            "aten.detach.default",
            "aten.detach_.default",
            "aten.lift_fresh_copy.default",
            "aten.clone.default",
            "aten.contiguous.default",
        ],
        _same,
    ),
    **dict.fromkeys(
        [
            "aten._to_copy.default",
            "aten.to.dtype",
            "aten.to.dtype_layout",
            "aten.to.device",
            "aten.to.other",
            "aten.type_as.default",
        ],
        _cast,
    ),
    "aten.dropout.default": _dropout,
    **{
        f"aten.{name}.default": _unary(name)
        for name in ("neg exp sqrt rsqrt cos sin tanh sigmoid relu silu".split())
    },
    "aten.gelu.default": _gelu,
    **{
        f"aten.{name}.{kind}": _binary(name, True)
        for name in ("add", "mul")
        for kind in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.{kind}": _binary(name)
        for name in ("sub", "div")
        for kind in ("Tensor", "Scalar")
    },
    "aten.rsub.Scalar": _reversed_sub,
    "aten.rsub.Tensor": _reversed_sub,
    "aten.pow.Tensor_Scalar": _power,
    "aten.pow.Tensor_Tensor": _power,
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.matmul.default": _matmul,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "octavo.attention.default": _attention,
    **SHAPE_RULES,
}
