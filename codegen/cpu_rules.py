"""The kernels of the cpu target: which op is rendered from which template, with which constants."""

from __future__ import annotations

from functools import partial
from typing import Any

from octavo.codegen.kernels import Kernel, KernelRules, Rule, kv_code_constants
from octavo.ir.graph import Node
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import KVType, QuantType, TensorType


def _width(node: Node, index: int = 0) -> Any:
    return node.operand(index).shape[-1]


def _norm(node: Node, *, weight_at: int) -> Rule:
    weight, bias = [*node.inputs[weight_at:], None, None][:2]
    constants = (
        ("hidden", _width(node)),
        ("dtype", node.operand(0).dtype),
        ("weight_rank", 0 if weight is None else weight.tensor.rank),
        ("weight_dtype", None if weight is None else weight.dtype),
        ("has_bias", bias is not None),
        *node.attrs.items(),
    )
    is_fused = weight_at == 2
    prepared = (weight_at,) if node.op.endswith("rms_norm") and weight is not None else ()
    return Rule(
        ("out", "total") if is_fused else ("out",),
        Kernel(node.op, constants, (_width(node),), prepared=prepared),
        in_place=((1, 0), (1, 1)) if is_fused else (),
    )


def _linear(node: Node) -> Rule:
    weight_type = node.operand(1).type
    if isinstance(weight_type, QuantType):
        return _quant_linear(node, weight_type)
    n, k = node.operand(1).shape
    bias = len(node.inputs) > 2 and node.inputs[2] is not None
    x = node.operand(0)
    constants = (
        ("k", k),
        ("n", n),
        ("dtype", x.dtype),
        ("has_bias", bias),
        ("rank", x.tensor.rank),
        ("is_prepared", node.operand(1).is_weight),
    )
    prepared = (1,) if node.operand(1).is_weight else ()
    label = (k, n, *(("bias",) if bias else ()))
    return Rule(("out",), Kernel("linear", constants, label, prepared=prepared))


def _quant_linear(node: Node, weight: QuantType) -> Rule:
    """By the scheme: packed products of 8 or 4 bits, or a weight that is dequantised at load."""
    x, scheme, (n, k) = node.operand(0), weight.scheme, weight.shape
    template, layout = quant_kernel(scheme)
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    constants = (
        ("k", k),
        ("n", n),
        ("dtype", x.dtype),
        ("scheme", scheme),
        ("has_bias", has_bias),
    )
    label = (scheme.codes, k, n, *(("bias",) if has_bias else ()))
    kernel = Kernel(
        "linear", constants, label, template=template, prepared=(1,), layouts=((1, layout),)
    )
    return Rule(("out",), kernel)


def _quant_embedding(node: Node) -> Rule | None:
    matrix = node.operand(1).type
    assert isinstance(matrix, QuantType), f"{node}: no quantised table"
    scheme, (n, k) = matrix.scheme, matrix.shape
    _, layout = quant_kernel(scheme)
    if scheme.codes != "int8" or scheme.block[0] != 1 or not _is_plain(scheme):
        return None
    constants = (("k", k), ("n", n), ("scheme", scheme))
    return Rule(("out",), Kernel(node.op, constants, (k,), layouts=((1, layout),)))


def quant_kernel(scheme: QuantScheme) -> tuple[str, str]:
    """The template for matrices of a scheme, and how they are packed."""
    if scheme.codes == "int8" and scheme.block in ((1, None), (None, None)) and _is_plain(scheme):
        return "quant_linear_int8", "plain"
    is_int4 = scheme.codes in ("int4", "uint4") and scheme.block[0] == 1
    if is_int4 and scheme.block[1] in _INT4_GROUPS:
        return "quant_linear_int4", "nibbles"
    is_grouped = scheme.codes == "int8" and scheme.block[0] == 1 and _is_plain(scheme)
    if is_grouped and scheme.block[1] in _INT4_GROUPS:
        return "quant_linear_int4", "plain"  # a code is two of 4 bits
    return DEQUANTIZED_AT_LOAD, "plain"


DEQUANTIZED_AT_LOAD = "quant_linear_dense"
_INT4_GROUPS = (32, 64, 128, 256)  # that PyTorch's kernel takes


def _is_plain(scheme: QuantScheme) -> bool:
    return scheme.zero is None and scheme.offset is None


def _gated_activation(node: Node) -> Rule:
    x = node.operand(0)
    activation = node.attrs["activation"]
    constants = (("width", x.shape[-1]), ("dtype", x.dtype), ("activation", activation))
    kernel = Kernel(node.op, constants, (activation, x.shape[-1]))
    return Rule(("out",), kernel, in_place=((0, 0),))


def _softcap(node: Node) -> Rule:
    constants = (("dtype", node.operand(0).dtype), ("cap", node.attrs["cap"]))
    kernel = Kernel(node.op, constants, (node.operand(0).shape[-1],))
    return Rule(("out",), kernel, in_place=((0, 0),))


def _rotary_constants(x: TensorType, cos: TensorType, interleaved: bool) -> tuple[Any, ...]:
    return (
        ("head_dim", x.shape[-1]),
        ("rotary_dim", cos.shape[-1]),
        ("dtype", x.dtype),
        ("table_dtype", cos.dtype),
        ("interleaved", interleaved),
    )


def _rotary(node: Node) -> Rule:
    x, cos = node.operand(0).tensor, node.operand(1).tensor
    constants = _rotary_constants(x, cos, node.attrs["interleaved"])
    kernel = Kernel(
        node.op,
        (("heads", x.shape[1]), *constants),
        (x.shape[1], x.shape[2]),
        plan_operands=(1, 2),
        plan_constants=("rotary", *constants),
    )
    return Rule(("out",), kernel)


def _code_constants(node: Node, kv_at: int, *, scales_at: int) -> tuple[tuple[str, Any], ...]:
    kv = node.operand(kv_at).type
    assert isinstance(kv, KVType), f"{node}: operand {kv_at} is no KV state"
    codes = kv_code_constants(node, kv, scales_at)
    return (("kv_dtype", kv.dtype), *codes) if codes else ()


def _kv_write(node: Node) -> Rule:
    k, v = node.operand(1), node.operand(2)
    constants = (
        ("kv_heads", k.shape[1]),
        ("head_dim", k.shape[2]),
        ("v_head_dim", v.shape[2]),
        ("dtype", k.dtype),
        *_code_constants(node, 0, scales_at=4),
    )
    return Rule((None,), Kernel(node.op, constants, (k.shape[1], k.shape[2])))


def _rotary_kv_write(node: Node) -> Rule:
    q, k, v, cos = (node.operand(i).tensor for i in (1, 2, 3, 4))
    constants = _rotary_constants(q, cos, node.attrs["interleaved"])
    kernel = Kernel(
        node.op,
        (
            ("heads", q.shape[1]),
            ("kv_heads", k.shape[1]),
            ("v_head_dim", v.shape[2]),
            *constants,
            *_code_constants(node, 0, scales_at=7),
        ),
        (q.shape[1], k.shape[1], k.shape[2]),
        plan_operands=(4, 5),
        plan_constants=("rotary", *constants),
    )
    return Rule(("out", None), kernel)


def _paged_attention(node: Node) -> Rule:
    q, kv = node.operand(0).tensor, node.operand(1).type
    assert isinstance(kv, KVType)
    slot = kv.slots[node.attrs["slot"]]
    attrs = {key: value for key, value in node.attrs.items() if key != "slot"}
    has_sinks = len(node.inputs) > 5 and node.inputs[5] is not None
    constants = (
        ("heads", q.shape[1]),
        ("kv_heads", slot.num_kv_heads),
        ("head_dim", slot.head_dim),
        ("v_head_dim", slot.v_head_dim),
        ("dtype", q.dtype),
        ("kv_dtype", kv.dtype),
        *attrs.items(),
        ("has_sinks", has_sinks),
        *kv_code_constants(node, kv, scales_at=6),
    )
    spans = [f"w{attrs['window']}"] if attrs["window"] else []
    label = (q.shape[1], slot.num_kv_heads, slot.head_dim, *spans)
    plan_constants = ("paged_attention", q.dtype, slot, attrs["window"], attrs["chunk"])
    return Rule(
        ("out",),
        Kernel(
            node.op,
            constants,
            label,
            plan_operands=(2, 3, 4),
            plan_constants=plan_constants,
            prepared=(3, 4),  # scales of heads, behind q, kv and sinks once the plan is made
        ),
    )


CPU_RULES: KernelRules = {
    "linear": _linear,
    "quant_embedding": _quant_embedding,
    "rms_norm": partial(_norm, weight_at=1),
    "layer_norm": partial(_norm, weight_at=1),
    "add_rms_norm": partial(_norm, weight_at=2),
    "add_layer_norm": partial(_norm, weight_at=2),
    "gated_activation": _gated_activation,
    "softcap": _softcap,
    "rotary": _rotary,
    "kv_write": _kv_write,
    "rotary_kv_write": _rotary_kv_write,
    "paged_attention": _paged_attention,
}
