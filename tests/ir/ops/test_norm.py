"""Norms against PyTorch and against Hugging Face's own modules, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo.ir.ops import op_def

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def evaluate(name: str, *operands, **attrs):
    return op_def(name).evaluate(*operands, eps=EPS, **attrs)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 123])
@pytest.mark.parametrize(
    ("module", "attrs"),
    [
        (LlamaRMSNorm, {"round_first": True}),
        (GemmaRMSNorm, {"weight_offset": 1.0}),
        (Gemma2RMSNorm, {"weight_offset": 1.0}),
    ],
)
def test_rms_norm_is_hugging_faces(module, attrs, tokens, dtype):
    norm = module(48, eps=EPS).to(dtype)
    weight = drawn(48, dtype=dtype)
    norm.weight.data = weight
    x = drawn(1, tokens, 48, dtype=dtype)
    assert torch.equal(evaluate("rms_norm", x, weight, **attrs), norm(x))


def test_round_first_makes_a_difference():
    x, weight = drawn(64, 48, dtype=torch.bfloat16), drawn(48, dtype=torch.bfloat16)
    early = evaluate("rms_norm", x, weight, round_first=True)
    assert not torch.equal(early, evaluate("rms_norm", x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_without_a_weight_is_pytorchs(dtype):
    x = drawn(7, 48, dtype=dtype)
    exact = F.rms_norm(x.double(), (48,), eps=EPS)
    torch.testing.assert_close(evaluate("rms_norm", x), exact.to(dtype))
    torch.testing.assert_close(evaluate("rms_norm", x.double()), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", ["both", "weight", "bias", "none"])
def test_layer_norm_is_pytorchs(parameters, dtype):
    x = drawn(5, 48, dtype=dtype)
    weight = drawn(48, dtype=dtype) if parameters in ("both", "weight") else None
    bias = drawn(48, dtype=dtype) + 1 if parameters in ("both", "bias") else None
    wide = [None if p is None else p.double() for p in (weight, bias)]
    exact = F.layer_norm(x.double(), (48,), *wide, eps=EPS)
    torch.testing.assert_close(evaluate("layer_norm", x, weight, bias), exact.to(dtype))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_fused_add_is_the_add_and_the_norm(name):
    x, residual = drawn(5, 48, dtype=torch.bfloat16), drawn(5, 48, dtype=torch.bfloat16) + 1
    weight = drawn(48, dtype=torch.bfloat16)
    normed, total = evaluate(f"add_{name}", x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, evaluate(name, x + residual, weight))


def test_a_weight_for_each_head():
    x, weight = drawn(5, 3, 16, dtype=torch.float32), drawn(3, 16, dtype=torch.float32)
    for head in range(3):
        alone = evaluate("rms_norm", x[:, head], weight[head])
        assert torch.equal(evaluate("rms_norm", x, weight)[:, head], alone)
