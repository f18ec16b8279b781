"""Each registered op: documented, and inferred as it evaluates. A new op needs a sample here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from octavo.ir.errors import VerifyError
from octavo.ir.ops import infer_types, op_def, registered_ops, resolve
from octavo.ir.ops.aten import OperandRef
from octavo.ir.ops.constant import SOURCED
from octavo.ir.ops.elementwise import ACTIVATIONS
from octavo.ir.ops.paged import KVState
from octavo.ir.ops.quant import QUANT_SOURCED
from octavo.ir.parser import parse_graph
from octavo.ir.quant_tensor import quantize
from octavo.ir.types import DTYPE_NAMES, QuantType, SymDim, TensorType, Type

T = SymDim("T")
SIZES = {"T": 5, "S": 2, "B": 3, "R": 2}
KV = "kv<f32, 2 x [2, 8, 8]>"
UNARY = "neg exp sqrt rsqrt cos sin tanh sigmoid relu silu gelu".split()
BINARY = "add sub mul div pow".split()

# op, operand types (none: absent), attributes
SAMPLES: list[tuple[str, list[str | None], dict[str, Any]]] = [
    *[(name, ["f32[T, 8]"], {}) for name in UNARY],
    *[(name, ["bf16[]"], {}) for name in UNARY],
    *[(name, ["i64[T]"], {}) for name in "neg exp sqrt rsqrt cos sin tanh sigmoid relu".split()],
    ("gelu", ["f32[T]"], {"approximate": "tanh"}),
    *[(name, ["f32[T, 8]", "f32[8]"], {}) for name in BINARY],
    *[(name, ["f32[T, 1]", "bf16[1, 8]"], {}) for name in BINARY],
    *[(name, ["bf16[T]", "f32[]"], {}) for name in BINARY],
    *[(name, ["i64[T]"], {"scalar": 2}) for name in BINARY],
    *[(name, ["i64[T]"], {"scalar": 2.0}) for name in BINARY],
    *[(name, ["f16[T]"], {"scalar": 2}) for name in BINARY],
    ("mul", ["bool[T]", "i64[T]"], {}),
    ("cast", ["f32[T, 8]"], {"dtype": "bf16"}),
    ("cast", ["bool[T]"], {"dtype": "i64"}),
    ("softcap", ["f32[T, 8]"], {"cap": 30.0}),
    *[("gated_activation", ["bf16[T, 8]"] * 2, {"activation": name}) for name in ACTIVATIONS],
    ("linear", ["f32[T, 8]", "f32[6, 8]"], {}),
    ("linear", ["bf16[1, T, 8]", "bf16[6, 8]", "bf16[6]"], {}),
    ("linear", ["bf16[T, 8]", "int4<1x4, bf16>[6, 8]", "bf16[6]"], {}),
    ("fused_linear", ["f16[T, 8]", "f8e4m3<*x*, f32>[6, 8]"], {"out_dtype": "f32"}),
    ("quantize", ["bf16[6, 8]"], {"scheme": "nf4<1x4, f32>"}),
    ("dequantize", ["uint4<1x4, f16, zero=u8>[6, 8]"], {"dtype": "bf16"}),
    ("quant_embedding", ["i64[T]", "int8<1x*, f32>[9, 8]"], {"dtype": "bf16"}),
    ("concat_rows", ["int8<1x*, f32>[6, 8]", "int8<1x*, f32>[1, 8]"], {}),
    ("matmul", ["f32[4, T, 8]", "f32[4, 8, T]"], {}),
    ("embedding", ["i64[1, T]", "f32[9, 8]"], {}),
    ("gather_rows", ["f32[9, 2, 4]", "i64[T]"], {}),
    ("rms_norm", ["bf16[T, 8]", "bf16[8]"], {"eps": 1e-6, "round_first": True}),
    ("rms_norm", ["bf16[T, 8]"], {"eps": 1e-6}),
    ("rms_norm", ["f32[T, 2, 8]", "f32[2, 8]"], {"eps": 1e-6, "weight_offset": 1.0}),
    ("layer_norm", ["bf16[T, 8]", "bf16[8]", "bf16[8]"], {"eps": 1e-6}),
    ("layer_norm", ["f32[T, 8]", None, "f32[8]"], {"eps": 1e-6}),
    ("add_rms_norm", ["bf16[T, 8]", "bf16[T, 8]", "bf16[8]"], {"eps": 1e-6}),
    ("add_layer_norm", ["f32[T, 8]", "f32[T, 8]", "f32[8]"], {"eps": 1e-6}),
    ("rotary", ["bf16[T, 2, 8]", "f32[T, 8]", "f32[T, 8]"], {}),
    ("rotary", ["bf16[T, 2, 8]", "bf16[T, 4]", "bf16[T, 4]"], {"interleaved": True}),
    ("attention", ["f32[1, 4, T, 8]", "f32[1, 2, T, 8]", "f32[1, 2, T, 6]"], {"scale": 0.3}),
    (
        "attention",
        ["bf16[1, 4, T, 8]", "bf16[1, 4, T, 8]", "bf16[1, 4, T, 8]", "bf16[4]", "f32[1, 1, T, T]"],
        {"scale": 0.3, "causal": False, "window": 2, "chunk": 3, "softcap": 5.0},
    ),
    ("kv_write", [KV, "f32[T, 2, 8]", "f32[T, 2, 8]", "i64[T]"], {"slot": 1}),
    (
        "rotary_kv_write",
        [KV, "f32[T, 4, 8]", *["f32[T, 2, 8]"] * 2, *["f32[T, 6]"] * 2, "i64[T]"],
        {"slot": 0},
    ),
    (
        "paged_attention",
        ["f32[T, 4, 8]", KV, "i32[S, B]", "i32[S+1]", "i32[S]", "f32[4]"],
        {"slot": 1, "scale": 0.3, "window": 2},
    ),
    ("embedding_sumsq", ["i64[T]", "bf16[11, 128]"], {}),
    ("pointwise", ["bf16[T, 64]", "f32[T, 1]"], {"expr": "t0 = mul(a0, a1); mul(t0, tanh(t0))"}),
    ("fused_linear", ["bf16[T, 64]", "bf16[6, 64]"], {"out_dtype": "f32"}),
    (
        "fused_linear",
        ["bf16[T, 64]", "bf16[128, 64]", "bf16[128]", "bf16[T, 64]", "f32[T, 1]"],
        {"norm_eps": 1e-5, "activation": "silu", "emit_sumsq": True},
    ),
    (
        "rotary_paged_attention",
        [
            *[KV, "f32[T, 4, 8]", *["f32[T, 2, 8]"] * 2, *["f32[T, 6]"] * 2, "i64[T]"],
            *["i32[S, B]", "i32[S+1]", "i32[S]", None, "f32[8]", "f32[8]"],
        ],
        {"slot": 0, "scale": 0.3, "norm_eps": 1e-6},
    ),
    ("reshape", ["f32[T, 8]"], {"shape": (SymDim("T", 2), 4)}),
    ("expand", ["f32[T, 1]"], {"shape": (3, T, 8)}),
    ("transpose", ["f32[2, T, 8]"], {"dim0": 0, "dim1": -1}),
    ("permute", ["f32[2, T, 8]"], {"dims": (1, 2, 0)}),
    ("unsqueeze", ["f32[T]"], {"dim": -1}),
    ("squeeze", ["f32[1, T]"], {"dim": 0}),
    ("slice", ["f32[T, 8]"], {"dim": 1, "start": 1, "end": 7, "step": 2}),
    ("select", ["f32[T, 8]"], {"dim": 0, "index": -1}),
    ("split", ["f32[T, 8]"], {"sizes": (2, 6), "dim": 1}),
    ("concat", ["f32[T, 8]", "f32[3, 8]", "f32[T, 8]"], {"dim": 0}),
    ("concat", ["bf16[T, 2]", "f32[T, 6]"], {"dim": -1}),
    ("concat", ["i64[3]"], {"dim": 0}),
    ("literal", [], {"data": ((1.0, 2.0), (3.0, 4.0)), "type": TensorType("f32", (2, 2))}),
    ("literal", [], {"data": 1.5, "type": TensorType("bf16", ())}),
    ("iota", [], {"n": 5}),
    ("fill", [], {"value": 0.5, "type": TensorType("f16", (2, 3))}),
    ("aten.mean.dim", ["f32[T, 8]"], {"dim": (-1,), "keepdim": True}),
    ("aten.sum.default", ["bf16[T, 8]"], {"dtype": "f32"}),
    ("aten.cumsum.default", ["i64[1, T]"], {"dim": 1}),
    ("aten.where.ScalarOther", ["bool[T]", "f32[T]"], {"other": 0.0}),
    ("aten.pow.Scalar", ["f32[T]"], {"self": 2.0}),
    ("aten.stack.default", ["f32[T]", "f32[T]"], {"tensors": (OperandRef(0), OperandRef(1))}),
    ("aten.index.Tensor", ["f32[9, 8]", "i64[T]"], {"indices": (OperandRef(1),)}),
    ("aten.repeat.default", ["f32[T, 2]"], {"repeats": (3, 1)}),
    ("aten.topk.default", ["f32[T, 8]"], {"k": 2}),
    ("aten.arange.default", [], {"end": T}),
]


def parsed_type(text: str | None) -> Type | None:
    return (
        None if text is None else parse_graph(f"graph @g(%x: {text}) {{ return }}").inputs[0].type
    )


def sample_operands(name: str, types: list[Type | None]) -> list[Any]:
    drawn = torch.Generator().manual_seed(0)
    known = {
        "i32[S, B]": torch.tensor([[1, 2, 0], [3, 0, 0]], dtype=torch.int32),
        "i32[S+1]": torch.tensor([0, 3, 5], dtype=torch.int32),
        "i32[S]": torch.tensor([4, 2], dtype=torch.int32),
    }
    operands: list[Any] = []
    for declared in types:
        if declared is None or str(declared) in known:
            operands.append(known.get(str(declared)))
        elif isinstance(declared, QuantType):
            noise = torch.randn(declared.shape, generator=drawn)
            operands.append(quantize(noise, declared.scheme))
        elif not isinstance(declared, TensorType):
            operands.append(KVState.empty(declared, num_blocks=4, block_size=2))
        else:
            noise = torch.rand(declared.sizes(SIZES), generator=drawn) + 1
            operands.append(noise.to(declared.torch_dtype))
    return operands


@pytest.mark.parametrize(
    ("name", "texts", "given"),
    SAMPLES,
    ids=[f"{i}-{sample[0]}" for i, sample in enumerate(SAMPLES)],
)
def test_inference_says_what_evaluation_yields(name, texts, given):
    types = [parsed_type(text) for text in texts]
    attrs = op_def(name).complete(given)
    inferred = infer_types(name, types, attrs)
    resolved = {key: resolve(value, SIZES) for key, value in attrs.items()}
    found = op_def(name).evaluate(*sample_operands(name, types), **resolved)
    results = found if isinstance(found, tuple | list) else (found,)
    assert len(results) == len(inferred)
    for result, declared in zip(results, inferred, strict=True):
        if isinstance(declared, TensorType):
            assert DTYPE_NAMES[result.dtype] == declared.dtype
            assert tuple(result.shape) == declared.sizes(SIZES)
        elif isinstance(declared, QuantType):
            result.check()
            assert (result.scheme, result.shape) == (declared.scheme, declared.shape)
        else:
            assert isinstance(result, KVState)
            assert declared == types[0]


def test_every_op_has_a_sample():
    assert registered_ops().keys() - {sample[0] for sample in SAMPLES} == {
        *SOURCED,
        *QUANT_SOURCED,
    }


@pytest.mark.parametrize("name", sorted(registered_ops()))
def test_every_op_has_a_line_of_doc_and_annotated_parameters(name):
    definition = registered_ops()[name]
    assert definition.doc.endswith((".", "``.", ":")) or "``" in definition.doc
    assert len(definition.doc) > 5
    for parameter in inspect.signature(definition.evaluate).parameters.values():
        assert parameter.annotation is not parameter.empty, f"{name}: {parameter}"


@pytest.mark.parametrize("scalar", [1, 1.0, True])
def test_inference_tells_equal_scalars_of_other_kinds_apart(scalar):
    # 1 == 1.0 == True, also as keys of a cache.
    (inferred,) = infer_types("add", [TensorType("i64", (T,))], {"scalar": scalar})
    expected = (torch.ones(1, dtype=torch.int64) + scalar).dtype
    assert inferred == TensorType(DTYPE_NAMES[expected], (T,))


def test_probing_finds_affine_dims():
    x = TensorType("f32", (SymDim("T", 2, 1), 3))
    (doubled,) = infer_types("aten.repeat.default", [x], {"repeats": (2, 1)})
    assert doubled.shape == (SymDim("T", 4, 2), 3)
    (padded,) = infer_types("aten.constant_pad_nd.default", [x], {"pad": (0, 0, 1, 4)})
    assert padded.shape == (SymDim("T", 2, 6), 3)


@pytest.mark.parametrize(
    ("name", "texts", "attrs", "message"),
    [
        ("aten.flatten.using_ints", ["f32[T, S]"], {}, "dim 0 is not affine in a symbol"),
        ("aten.view.default", ["f32[T, 3]"], {"size": (7, 7)}, "aten.view.default(f32[T, 3])"),
        ("add", ["f32[T]", "f32[S]"], {"scalar": None}, "dim -1 is T and S: cannot broadcast"),
        ("add", ["f32[T]", "f32[4]"], {"scalar": None}, "dim -1 is T and 4: cannot broadcast"),
        ("add", ["f32[T]"], {"scalar": None}, "exactly one of the second operand and"),
        ("add", [KV, "f32[4]"], {"scalar": None}, "add(kv<f32, 2 x [2, 8, 8]>, f32[4])"),
        ("matmul", [KV, KV], {}, "matmul does not take a KV state"),
        ("matmul", ["f32[T, 8]", "f32[7, 8]"], {}, "matmul(f32[T, 8], f32[7, 8])"),
        ("linear", ["f32[T, 8]", "bf16[6, 8]"], {}, "linear: dtypes differ"),
        ("linear", ["f32[T, 8]", "f32[6, 8]", "f32[8]"], {}, "the bias f32[8] does not fit"),
        ("embedding", ["f32[T]", "f32[6, 8]"], {}, "embedding: needs integer ids"),
        ("reshape", ["f32[T, 8]"], {"shape": (T, 9)}, "another number of elements"),
        ("concat", ["f32[T, 8]", "f32[S, 8]"], {"dim": 0}, "not affine in one symbol"),
        ("concat", ["f32[T, 8]", "f32[T, 7]"], {"dim": 0}, "differ beside dim 0"),
        ("squeeze", ["f32[T, 8]"], {"dim": 0}, "squeeze: dim 0 of f32[T, 8] is not 1"),
        ("rms_norm", ["f32[T, 8]", "f32[9]"], {"eps": 1.0}, "the weight f32[9] does not fit"),
        ("kv_write", [KV, *["f32[T, 2, 8]"] * 2, "i64[T]"], {"slot": 2}, "slot 2 is not one of"),
        ("kv_write", [KV, *["bf16[T, 2, 8]"] * 2, "i64[T]"], {"slot": 1}, "cache's dtype f32"),
        ("cast", ["f32[T]"], {"dtype": "f33"}, "cast(f32[T]): unknown 'f33'"),
        ("no_such_op", [], {}, "unknown op 'no_such_op'"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name, texts, attrs, message):
    with pytest.raises(VerifyError) as caught:
        infer_types(name, [parsed_type(text) for text in texts], attrs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
