"""Rotary embedding against the three forms found in Hugging Face's models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from octavo.ir.ops import op_def
from octavo.ir.ops.paged import KVState
from octavo.ir.types import KVType, SlotShape


def rotary(x: Tensor, cos: Tensor, sin: Tensor, **attrs: bool) -> Tensor:
    return op_def("rotary").evaluate(x, cos, sin, **attrs)


def heads(tokens: int, num_heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + num_heads)
    return torch.randn(tokens, num_heads, 16, generator=generator).to(dtype)


def tables(tokens: int, width: int, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin ``[T, width]``, each angle for both members of its pair."""
    frequencies = 100.0 ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(tokens) + 3)[:, None] * frequencies
    if interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


FORMS = {
    "llama": (modeling_llama.apply_rotary_pos_emb, 16, False),
    "gpt_neox, partial": (modeling_gpt_neox.apply_rotary_pos_emb, 4, False),
    "cohere, interleaved": (modeling_cohere.apply_rotary_pos_emb, 16, True),
}


@pytest.mark.parametrize("tokens", [1, 5, 123])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_hugging_faces(name, tokens):
    apply, width, interleaved = FORMS[name]
    cos, sin = tables(tokens, width, interleaved)
    q, k = heads(tokens, 4), heads(tokens, 2)
    theirs = apply(*(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None])
    for ours, other in zip((q, k), theirs, strict=True):
        result = rotary(ours, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(result, other[0].transpose(0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_a_rotation_of_complex_numbers(interleaved):
    # Su et al. 2021: the pair (a, b) is a + bi, turned by the position's angle.
    x = heads(5, 2, torch.float64)
    cos, sin = (t.double() for t in tables(5, 16, interleaved))
    result = rotary(x, cos, sin, interleaved=interleaved)
    pair = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 8), slice(8, 16))
    turn = torch.complex(cos[:, None, pair[0]], sin[:, None, pair[0]])
    expected = torch.complex(x[..., pair[0]], x[..., pair[1]]) * turn
    torch.testing.assert_close(result[..., pair[0]], expected.real)
    torch.testing.assert_close(result[..., pair[1]], expected.imag)


def test_dims_beyond_the_table_pass_through():
    x = heads(5, 2)
    assert torch.equal(rotary(x, *tables(5, 4))[..., 4:], x[..., 4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rotated_in_f32(dtype):
    x, (cos, sin) = heads(9, 2, dtype), tables(9, 16)
    exact = rotary(x.double(), cos.double(), sin.double())
    result = rotary(x, cos, sin)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-6
    )


def test_the_fused_write_rotates_and_stores():
    q, k, v = heads(3, 4), heads(3, 2), heads(3, 2) + 1
    cos, sin = tables(3, 8)
    state = KVState.empty(KVType("f32", (SlotShape(2, 16, 16),)), num_blocks=3, block_size=2)
    slots = torch.tensor([5, 2, 3])
    turned, after = op_def("rotary_kv_write").evaluate(state, q, k, v, cos, sin, slots, slot=0)
    assert torch.equal(turned, rotary(q, cos, sin))
    assert torch.equal(after.keys[0].flatten(0, 1)[slots], rotary(k, cos, sin))
    assert torch.equal(after.values[0].flatten(0, 1)[slots], v)
    assert after.keys[0].flatten(0, 1)[[0, 1, 4]].isnan().all()
