"""The kernels of the cuda targets: which op is rendered from which template, with which constants.

The operands of ``run`` are the op's, in order, absent ones left out; then results and scratch
buffers by keyword, then what the kernel wants of the program (docs/cuda.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.codegen.kernels import Kernel, KernelRules, Rule, kv_code_constants
from octavo.codegen.triton_layouts import TritonLayout, why_no_kernel
from octavo.ir.graph import Node, Value
from octavo.ir.types import KVType, QuantType, TensorType

_WORKSPACE = ("workspace",)
_ATTENTION = ("block_size", "workspace")


def sampler(vocab_size: int) -> Kernel:
    """The kernel that draws tokens from the logits; the executor calls it, no op does."""
    return Kernel("sample", (("vocab_size", vocab_size),), (vocab_size,))


def _operand(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _width(value: Value) -> int:
    width = value.shape[-1]
    assert isinstance(width, int), f"{value} has a symbolic width"
    return width


def _linear(node: Node) -> Rule | None:
    """``linear`` and ``fused_linear``: the former is the latter with nothing around it."""
    x, weight = node.operand(0), node.operand(1)
    if not weight.is_weight or x.dtype not in ("bf16", "f16", "f32"):
        return None
    constants = _linear_constants(node)
    scratch = []
    if constants["norm_eps"] is not None:
        scratch.append(("normed", x.tensor))
    wide = ("wide", x.tensor.with_shape(*x.shape[:-1], constants["n"]))
    if isinstance(weight.type, QuantType):
        if why_no_kernel(weight.type.scheme) is not None:
            return None
        return _quant_linear(node, weight.type, constants, [*scratch, wide])
    if constants["activation"] is not None:
        scratch.append(wide)
    label = _linear_label(constants)
    kernel = Kernel(node.op, (*constants.items(),), label, template="linear", keywords=_WORKSPACE)
    return _linear_rule(node, kernel, scratch)


def _linear_rule(node: Node, kernel: Kernel, scratch: Sequence[tuple[str, TensorType]]) -> Rule:
    return Rule(
        ("out", "sumsq_out")[: len(node.outputs)],
        kernel,
        in_place=((0, 3),) if dict(kernel.constants)["has_residual"] else (),
        scratch=tuple(scratch),
    )


def _linear_constants(node: Node) -> dict[str, Any]:
    n, k = node.operand(1).shape
    has = {name: _operand(node, 2 + i) is not None for i, name in enumerate(_LINEAR_OPERANDS)}
    return {
        "k": k,
        "n": n,
        "dtype": node.operand(0).dtype,
        "out_dtype": node.outputs[0].dtype,
        "has_bias": has["bias"],
        "norm_eps": node.attrs.get("norm_eps"),
        "activation": node.attrs.get("activation"),
        "softcap": node.attrs.get("cap"),
        "has_residual": has["residual"],
        "takes_sumsq": has["sumsq"],
        "emit_sumsq": node.attrs.get("emit_sumsq", False),
    }


_LINEAR_OPERANDS = ("bias", "residual", "sumsq")


def _linear_label(constants: dict[str, Any]) -> tuple[Any, ...]:
    activation = constants["activation"]
    words = {
        "bias": constants["has_bias"],
        "norm": constants["norm_eps"] is not None,
        activation: activation is not None,
        "softcap": constants["softcap"] is not None,
        "residual": constants["has_residual"],
    }
    return (constants["k"], constants["n"], *(word for word, is_so in words.items() if is_so))


def _quant_linear(
    node: Node,
    weight: QuantType,
    constants: dict[str, Any],
    scratch: list[tuple[str, TensorType]],
) -> Rule:
    """A linear of a quantised weight of a scheme that the kernels know."""
    x, layout = node.operand(0).tensor, TritonLayout.of(weight.scheme, *weight.shape)
    label = (weight.scheme.codes, *_linear_label(constants))
    constants |= layout.constants(constants["dtype"], constants["out_dtype"])
    constants["sums_one_row"] = constants["takes_sumsq"] and _sums_one_row(node.operand(4))
    stands_around = constants["softcap"] is not None or constants["has_residual"]
    if constants["activation"] is None and not (constants["has_scaled"] and stands_around):
        scratch = scratch[:-1]  # nothing is wide but what PyTorch leaves for more to be done
    if weight.scheme.x is not None:
        width, block = layout.num_spans * layout.span, weight.scheme.x_block
        rounded = x.with_dtype(weight.scheme.x).with_shape(*x.shape[:-1], width)
        scales = x.with_dtype("f32").with_shape(*x.shape[:-1], width // (block or width))
        scratch += [("rounded", rounded), ("row_scales", scales)]
    kernel = Kernel(
        node.op,
        (*constants.items(),),
        label,
        template="quant_linear",
        keywords=_WORKSPACE,
        layouts=((1, "triton"),),
    )
    return _linear_rule(node, kernel, scratch)


def _sums_one_row(sumsq: Value) -> bool:
    """True when the kernel that makes sums of squares makes those of a single row: no GEMV does."""
    maker = sumsq.producer
    if maker is None:
        return False
    if maker.op == "embedding_sumsq":
        return True
    weight = maker.operand(1).type
    if not isinstance(weight, QuantType):
        return False
    return not TritonLayout.of(weight.scheme, *weight.shape).has_gemv


def _embedding(node: Node) -> Rule | None:
    ids, table = node.operand(0), node.operand(1)
    if ids.tensor.rank != 1 or table.dtype not in ("bf16", "f16", "f32"):
        return None
    emits = node.op == "embedding_sumsq"
    constants = (
        ("hidden", _width(table)),
        ("dtype", table.dtype),
        ("emit_sumsq", emits),
        ("scale", None),
    )
    label = (_width(table), *(("sumsq",) if emits else ()))
    outs = ("out", "sumsq") if emits else ("out",)
    return Rule(outs, Kernel(node.op, constants, label, template="embedding"))


def _gather_rows(node: Node) -> Rule | None:
    x = node.operand(0)
    if x.tensor.rank != 2 or x.dtype not in ("bf16", "f16", "f32"):
        return None
    constants = (("hidden", _width(x)), ("dtype", x.dtype))
    return Rule(("out",), Kernel(node.op, constants, (_width(x),)))


def _norm(node: Node, *, weight_at: int) -> Rule:
    x, weight, bias = node.operand(0), _operand(node, weight_at), _operand(node, weight_at + 1)
    constants = (
        ("hidden", _width(x)),
        ("dtype", x.dtype),
        ("weight_rank", 0 if weight is None else weight.tensor.rank),
        ("weight_dtype", None if weight is None else weight.dtype),
        ("has_bias", bias is not None),
        *node.attrs.items(),
    )
    is_fused = weight_at == 2
    return Rule(
        ("out", "total") if is_fused else ("out",),
        Kernel(node.op, constants, (_width(x),)),
        in_place=((1, 0), (1, 1)) if is_fused else (),
    )


def _gated_activation(node: Node) -> Rule:
    x, activation = node.operand(0), node.attrs["activation"]
    constants = (("width", _width(x)), ("dtype", x.dtype), ("activation", activation))
    kernel = Kernel(node.op, constants, (activation, _width(x)))
    return Rule(("out",), kernel, in_place=((0, 0),))


def _softcap(node: Node) -> Rule:
    x = node.operand(0)
    constants = (("dtype", x.dtype), ("cap", node.attrs["cap"]))
    return Rule(("out",), Kernel(node.op, constants, (_width(x),)), in_place=((0, 0),))


def _pointwise(node: Node) -> Rule:
    tensors = [value.tensor for value in node.operands]
    constants = (
        ("expr", node.attrs["expr"]),
        ("operands", tuple(tensors)),
        ("result", node.outputs[0].tensor),
    )
    return Rule(("out",), Kernel(node.op, constants, (_width(node.outputs[0]),)))


def _rotary_constants(cos: TensorType, interleaved: bool) -> tuple[tuple[str, Any], ...]:
    return (
        ("rotary_dim", cos.shape[-1]),
        ("table_dtype", cos.dtype),
        ("interleaved", interleaved),
    )


def _rotary(node: Node) -> Rule:
    x, cos = node.operand(0).tensor, node.operand(1).tensor
    constants = (
        ("heads", x.shape[1]),
        ("head_dim", x.shape[2]),
        ("dtype", x.dtype),
        *_rotary_constants(cos, node.attrs["interleaved"]),
    )
    return Rule(("out",), Kernel(node.op, constants, (x.shape[1], x.shape[2])))


def _head_constants(node: Node, kv_at: int, scales_at: int) -> tuple[tuple[str, Any], ...]:
    kv = node.operand(kv_at).type
    assert isinstance(kv, KVType), f"{node}: operand {kv_at} is no KV state"
    slot = kv.slots[node.attrs["slot"]]
    return (
        ("kv_heads", slot.num_kv_heads),
        ("head_dim", slot.head_dim),
        ("v_head_dim", slot.v_head_dim),
        ("kv_dtype", kv.dtype),
        *kv_code_constants(node, kv, scales_at),
    )


def _kv_write(node: Node) -> Rule:
    k = node.operand(1).tensor
    constants = (*_head_constants(node, 0, 4), ("dtype", k.dtype))
    return Rule((None,), Kernel(node.op, constants, (k.shape[1], k.shape[2])))


def _rotary_kv_write(node: Node) -> Rule:
    q, k, cos = (node.operand(i).tensor for i in (1, 2, 4))
    constants = (
        ("heads", q.shape[1]),
        *_head_constants(node, 0, 7),
        ("dtype", q.dtype),
        *_rotary_constants(cos, node.attrs["interleaved"]),
    )
    return Rule(("out", None), Kernel(node.op, constants, (q.shape[1], k.shape[1], k.shape[2])))


def _mask_constants(node: Node, sinks_at: int) -> tuple[tuple[str, Any], ...]:
    masks = ("scale", "window", "chunk", "softcap")
    return (
        *((name, node.attrs[name]) for name in masks),
        ("has_sinks", _operand(node, sinks_at) is not None),
        ("has_alibi", False),
    )


def _attention_label(q: TensorType, node: Node, kv_heads: Any) -> tuple[Any, ...]:
    window = node.attrs["window"]
    return (q.shape[1], kv_heads, q.shape[2], *([f"w{window}"] if window else []))


def _paged_attention(node: Node) -> Rule:
    q, heads = node.operand(0).tensor, _head_constants(node, 1, 6)
    constants = (
        ("heads", q.shape[1]),
        *heads,
        ("dtype", q.dtype),
        *_mask_constants(node, 5),
    )
    label = _attention_label(q, node, dict(heads)["kv_heads"])
    return Rule(("out",), Kernel(node.op, constants, label, keywords=_ATTENTION))


def _rotary_paged_attention(node: Node) -> Rule:
    q, cos, heads = node.operand(1).tensor, node.operand(4).tensor, _head_constants(node, 0, 13)
    constants = (
        ("heads", q.shape[1]),
        *heads,
        ("dtype", q.dtype),
        *_rotary_constants(cos, node.attrs["interleaved"]),
        *_mask_constants(node, 10),
        ("norm_eps", node.attrs["norm_eps"]),
        ("norm_offset", node.attrs["norm_offset"]),
        ("has_norm_weight", _operand(node, 11) is not None),
    )
    label = _attention_label(q, node, dict(heads)["kv_heads"])
    return Rule(("out", None), Kernel(node.op, constants, label, keywords=_ATTENTION))


TRITON_RULES: KernelRules = {
    "linear": _linear,
    "fused_linear": _linear,
    "embedding": _embedding,
    "embedding_sumsq": _embedding,
    "gather_rows": _gather_rows,
    "rms_norm": partial(_norm, weight_at=1),
    "layer_norm": partial(_norm, weight_at=1),
    "add_rms_norm": partial(_norm, weight_at=2),
    "add_layer_norm": partial(_norm, weight_at=2),
    "gated_activation": _gated_activation,
    "softcap": _softcap,
    "pointwise": _pointwise,
    "rotary": _rotary,
    "kv_write": _kv_write,
    "rotary_kv_write": _rotary_kv_write,
    "paged_attention": _paged_attention,
    "rotary_paged_attention": _rotary_paged_attention,
}
