"""Codes of the KV cache against their definition, and attention on them in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ir.errors import ParseError
from octavo.ir.kv_scheme import KVScheme, quantize_heads
from octavo.ir.ops import op_def
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.types import KVType, SlotShape

SCHEMES = ["f8e4m3 head", "f8e4m3 token", "i8 head", "i8 token"]


def e4m3(value: float) -> float:
    """The nearest number of OCP's 8-bit format with 4 bits of exponent, ties to the even one."""
    if value == 0:
        return value
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return max(-448.0, min(448.0, round(value / step) * step))


def defined_codes(
    x: Tensor, scheme: KVScheme, head_scale: Tensor | None, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales, a number at a time: f32's arithmetic, as the definition says."""
    codes, scales = torch.zeros(x.shape), torch.zeros(x.shape[:2])
    for t, h in np.ndindex(*x.shape[:2]):
        head = x[t, h].numpy().astype(np.float32)
        if offset is not None:
            head = head - offset[h].numpy()
        scale = np.float32(1 if head_scale is None else head_scale[h].item())
        if scheme.scales == "token":
            scale = np.abs(head).max() / np.float32(scheme.largest)
        scales[t, h] = float(scale)
        for d, element in enumerate(head):
            value = float(element / scale) if scale else 0.0
            if scheme.codes == "f8e4m3":
                codes[t, h, d] = e4m3(value)
            else:
                codes[t, h, d] = max(-127, min(127, round(value)))
    return codes, scales


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_those_of_the_definition(name, has_offset):
    scheme = KVScheme.parse(name)
    x = torch.randn(7, 3, 40) * torch.logspace(-3, 3, 7).view(-1, 1, 1)
    x[2, 1] = 0  # a head of zeros
    x[3, 0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 17, 19, 1e5])  # ties, and too large
    x[3, 0, 8] = 127.0
    head_scale = torch.tensor([1.0, 0.125, 3.0]) if scheme.scales == "head" else None
    offset = torch.randn(3, 40) if has_offset else None
    codes, scales = quantize_heads(x, scheme, head_scale, offset)
    expected, expected_scales = defined_codes(x, scheme, head_scale, offset)
    assert codes.dtype == scheme.dtype
    assert torch.equal(codes.float(), expected)
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_attention_reads_what_the_codes_stand_for(name, has_offset):
    """Two chunks and one whole: equal codes, and attention in float64 on the dequantised cache.

    Keys stand for their codes and the offset, although no read adds it.
    """
    scheme = KVScheme.parse(name)
    kv = KVType(scheme.codes, (SlotShape(2, 8, 4),), scheme.scales)
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 4)
    scale = [torch.tensor([0.02, 0.5]), None] if scheme.scales == "head" else [None, None]
    offset = torch.randn(2, 8) if has_offset else None
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    slots = torch.tensor([3, 1, 2]).repeat_interleave(4) * 4 + torch.arange(4).repeat(3)

    def run(chunks: list[int]) -> tuple[Tensor, KVState]:
        state, out, first = KVState.empty(kv, 5, 4), [], 0
        for end in chunks:
            new = slice(first, end)
            given = (k[new], v[new], slots[new], *scale, offset)
            op_def("kv_write").evaluate(state, *given, slot=0)
            start, length = torch.tensor([0, end - first]), torch.tensor([end])
            read = (table, start, length, None, *scale)
            attend = op_def("paged_attention").evaluate
            out.append(attend(q[new].double(), state, *read, slot=0, scale=0.3))
            first = end
        return torch.cat(out), state

    whole, state = run([10])
    chunked, state_of_chunks = run([3, 9, 10])
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(state.tensors(), state_of_chunks.tensors(), strict=True)
    )
    torch.testing.assert_close(chunked, whole)
    held = []
    for x, head_scale, off in ((k, scale[0], offset), (v, scale[1], None)):
        codes, scales = defined_codes(x, scheme, head_scale, off)
        stands_for = (codes * scales.unsqueeze(-1)).double()
        stands_for = stands_for if off is None else stands_for + off
        held.append(stands_for.repeat_interleave(2, 1).transpose(0, 1))
    scores = q.double().transpose(0, 1) @ held[0].mT * 0.3
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ held[1]
    torch.testing.assert_close(whole, expected.transpose(0, 1))


_KV = "kv<f8e4m3 head, 1 x [2, 8, 8]>"
TEXT = f"""graph @m(%k: f32[T, 2, 8], %slots: i64[T], %kv: {_KV}, @s: f32[2]) {{
  %kv~1: {_KV} = kv_write(%kv, %k, %k, %slots, @s, @s, slot=0)
  return %kv~1
}}
"""


def test_the_scheme_is_in_the_text():
    assert print_graph(parse_graph(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("f8e4m3 head", "f8e4m3 token", "has no scales of heads"),
        ("f8e4m3 head", "f8e4m3 row", "expected one of f8e4m3 head, f8e4m3 token, i8 head"),
        ("f8e4m3 head", "bf16 head", "'bf16 head' is no scheme"),
        ("@s: f32[2]", "@s: f32[3]", r"a scale for each KV head, f32\[2\], got f32\[3\]"),
    ],
)
def test_what_does_not_fit_is_refused(old, new, message):
    with pytest.raises(ParseError, match=message):
        parse_graph(TEXT.replace(old, new))


OFFSET = f"""graph @m(%k: f32[T, 2, 8], %slots: i64[T], %kv: {_KV}, @o: f32[2, 8]) {{
  %kv~1: {_KV} = kv_write(%kv, %k, %k, %slots, none, none, @o, slot=0)
  return %kv~1
}}
"""


def test_an_offset_is_in_the_text():
    assert print_graph(parse_graph(OFFSET)) == OFFSET


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("f8e4m3 head", "f32", r"holds no codes, so that its keys have no offset"),
        ("@o: f32[2, 8]", "@o: f32[8]", r"an offset of keys f32\[2, 8\], got f32\[8\]"),
        ("@o: f32[2, 8]", "@o: bf16[2, 8]", r"an offset of keys f32\[2, 8\], got bf16\[2, 8\]"),
    ],
)
def test_an_offset_that_does_not_fit_is_refused(old, new, message):
    with pytest.raises(ParseError, match=message):
        parse_graph(OFFSET.replace(old, new))
