"""Caches of codes for the steps of PagedCase, and what kernels are told of them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.kv_scheme import KVScheme
from octavo.ir.ops.paged import KVState, kv_write
from octavo.ir.types import DTYPE_NAMES
from tests.templates.triton.paged_case import PagedCase

SCHEMES = ["f8e4m3 head", "f8e4m3 token", "i8 head", "i8 token"]


def code_constants(scheme: KVScheme, *, has_head_scales: bool) -> dict[str, object]:
    """What a template is told of a cache of codes, over what the case says."""
    return {
        "kv_dtype": DTYPE_NAMES[scheme.dtype],
        "kv_scales": scheme.scales,
        "kv_largest": scheme.largest,
        "has_head_scales": has_head_scales,
    }


def head_scales(scheme: KVScheme) -> list[Tensor]:
    """Of two KV heads, for k and v; none where tokens have scales."""
    if scheme.has_token_scales:
        return []
    return [torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.05])]


def cached(case: PagedCase, scheme: KVScheme, scales: list[Tensor]) -> KVState:
    """The case's context as codes; zeros where nothing was written, as the runtime allocates."""
    shape = (case.num_blocks, case.kv_heads, case.block_size)
    sides = [torch.zeros(shape) for _ in range(2 * scheme.has_token_scales)]
    codes = [torch.zeros(x.shape).to(scheme.dtype) for x in (case.keys, case.values)]
    state = KVState(*((x,) for x in codes), *((x,) for x in sides))  # type: ignore[arg-type]
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    written = torch.nonzero(flat[0][:, 0, 0].isfinite()).flatten()
    kv_write.evaluate(state, *(x[written] for x in flat), written, *scales, slot=0)
    return state


def tensors(state: KVState) -> list[Tensor]:
    """What a kernel gets: the caches flat, scales of tokens as they are."""
    codes = [state.keys[0].flatten(0, 1), state.values[0].flatten(0, 1)]
    return [*codes, *(x[0] for x in (state.key_scales, state.value_scales) if x)]


def assert_near_codes(got: Tensor, want: Tensor) -> None:
    """Codes of numbers that differ in their last bits: some are the next code, few of them.

    Of numbers that differ by 2**-22 next to codes 2**-8 apart, one in 2**13 changes over.
    """
    assert got.dtype == want.dtype
    steps = (_ordered(got) - _ordered(want)).abs()
    assert steps.max() <= 1, f"off by {int(steps.max())} codes"
    assert (steps > 0).sum() <= 2 + steps.numel() / 2**12, f"{int((steps > 0).sum())} differ"


def _ordered(codes: Tensor) -> Tensor:
    """Codes as integers in the order of their values."""
    bits = codes.view(torch.int8).int()
    return bits if codes.dtype == torch.int8 else torch.where(bits < 0, -(bits & 127), bits)
