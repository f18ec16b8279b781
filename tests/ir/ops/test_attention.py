"""Attention against PyTorch's, and paged attention against attention of each sequence alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.ops import op_def
from octavo.ir.ops.paged import KVState
from octavo.ir.types import KVType, SlotShape

SCALE = 0.37


def attention(*operands, **attrs):
    return op_def("attention").evaluate(*operands, scale=SCALE, **attrs)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's own attention; mask is bool or additive."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)
    return out.transpose(1, 2)


MASKS = {
    "causal": ({}, lambda i, j: j <= i),
    "bidirectional": ({"causal": False}, lambda i, j: True),
    "window 1": ({"window": 1}, lambda i, j: j == i),
    "window 3": ({"window": 3}, lambda i, j: i - 2 <= j <= i),
    "chunk 4": ({"chunk": 4}, lambda i, j: j <= i and i // 4 == j // 4),
    "window and chunk": ({"window": 3, "chunk": 4}, lambda i, j: max(i - 2, i - i % 4) <= j <= i),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 5, 23])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_head_groups_match_sdpa(name, tokens, kv_heads):
    attrs, rule = MASKS[name]
    q, k, v = drawn((1, 6, tokens, 8), (1, kv_heads, tokens, 8), (1, kv_heads, tokens, 5))
    mask = torch.tensor([[rule(i, j) for j in range(tokens)] for i in range(tokens)])
    torch.testing.assert_close(attention(q, k, v, **attrs), dense(q, k, v, mask))


def test_a_bias_is_added_and_a_bool_bias_masks():
    q, k, v, bias = drawn((1, 4, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8), (1, 4, 7, 7))
    causal = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    expected = dense(q, k, v, bias + causal)
    torch.testing.assert_close(attention(q, k, v, None, bias), expected)
    keep = bias > -0.5
    keep |= torch.eye(7, dtype=torch.bool)
    expected = dense(q, k, v, keep & (causal == 0))
    torch.testing.assert_close(attention(q, k, v, None, keep), expected)


def test_softcap_squashes_the_scores():
    # One key against another: softmax of two scores is a sigmoid of their difference.
    q, k, v = drawn((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 4))
    scores = (q[0, 0, 1] * k[0, 0]).sum(-1) * SCALE
    capped = 2.0 * torch.tanh(scores / 2.0)
    share = torch.sigmoid(capped[0] - capped[1])
    expected = share * v[0, 0, 0] + (1 - share) * v[0, 0, 1]
    torch.testing.assert_close(attention(q, k, v, softcap=2.0)[0, 1, 0], expected)


def test_a_sink_is_a_key_of_its_own_with_a_zero_value():
    q, k, v, sinks = drawn((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8), (4,))
    # The extra key has score `sinks`: PyTorch gets it as an additive mask on a zero key.
    wide_k, wide_v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    causal = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1).expand(1, 4, 6, 6)
    mask = torch.cat((causal, sinks.view(1, 4, 1, 1).expand(1, 4, 6, 1)), dim=-1)
    torch.testing.assert_close(attention(q, k, v, sinks), dense(q, wide_k, wide_v, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_reduced_in_f32(dtype):
    q, k, v = (x.to(dtype) for x in drawn((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    exact = attention(q.double(), k.double(), v.double())
    result = attention(q, k, v)
    assert result.dtype == dtype
    # Only the rounding of the result is left.
    limit = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 0.51)
    torch.testing.assert_close(result.double(), exact, rtol=limit, atol=1e-6)


PAGED = {
    "causal": {},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "softcap": {"softcap": 1.5},
    "everything": {"window": 5, "chunk": 8, "softcap": 2.0},
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", PAGED)
def test_paged_attention_matches_attention_of_each_sequence(name, kv_heads, with_sinks):
    attrs, block_size, lens, new = PAGED[name], 4, [11, 1, 8, 5], [3, 1, 8, 0]
    sinks = drawn((4,))[0] if with_sinks else None
    kv_type = KVType("f64", (SlotShape(1, 1, 1), SlotShape(kv_heads, 8, 6)))
    state = KVState.empty(kv_type, num_blocks=12, block_size=block_size)
    table = torch.tensor([[7, 2, 9], [4, 0, 0], [1, 11, 0], [3, 5, 0]], dtype=torch.int32)
    queries, expected = [], []
    for s, (length, fresh) in enumerate(zip(lens, new, strict=True)):
        q, k, v = drawn((1, 4, length, 8), (1, kv_heads, length, 8), (1, kv_heads, length, 6))
        q = q + s  # the sequences differ
        whole = attention(q, k, v, sinks, **attrs)
        queries.append(q[0].transpose(0, 1)[length - fresh :])
        expected.append(whole[0][length - fresh :])
        slots = [
            int(table[s, p // block_size]) * block_size + p % block_size for p in range(length)
        ]
        for first, last in ((0, length - fresh), (length - fresh, length)):
            op_def("kv_write").evaluate(
                state,
                k[0].transpose(0, 1)[first:last],
                v[0].transpose(0, 1)[first:last],
                torch.tensor(slots[first:last], dtype=torch.int64),
                slot=1,
            )
    result = op_def("paged_attention").evaluate(
        torch.cat(queries),
        state,
        table,
        torch.tensor([0, 3, 4, 12, 12], dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        sinks,
        slot=1,
        scale=SCALE,
        **attrs,
    )
    torch.testing.assert_close(result, torch.cat(expected))
    assert state.keys[0].isnan().all(), "the other slot was touched"
