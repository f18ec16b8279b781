"""Caches of codes for the steps of PagedCase, and what kernels are told of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.kv_scheme import KVScheme
from octavo.ir.ops.paged import KVState, kv_write
from octavo.ir.types import DTYPE_NAMES
from tests.templates.triton.paged_case import PagedCase

SCHEMES = ["f8e4m3 head", "f8e4m3 token", "i8 head", "i8 token"]
# FP8 with scales of 1, and offsets of keys with each kind of scales.
ONES = "f8e4m3 head, ones"
OFFSETS = ["f8e4m3 head, offset", "f8e4m3 head, ones, offset", "i8 token, offset"]


@dataclass(frozen=True)
class Constants:
    """What a cache's codes go by: the scheme, scales of heads of k and v, and offsets of keys."""

    scheme: KVScheme
    scales: list[Tensor]
    offset: list[Tensor]

    @classmethod
    def of(cls, name: str, case: PagedCase) -> Constants:
        """Those of one of the names above. Offsets are as large as keys are."""
        text, *more = name.split(", ")
        scheme = KVScheme.parse(text)
        scales = [] if "ones" in more else head_scales(scheme)
        shape = (case.kv_heads, case.head_dim)
        return cls(scheme, scales, [torch.randn(shape)] if "offset" in more else [])

    @property
    def operands(self) -> list[Tensor | None]:
        """What ops that write take last; kernels take those that there are."""
        return [*(self.scales or (None, None)), *self.offset]

    @property
    def of_kernel(self) -> dict[str, object]:
        """What a template is told, over what the case says."""
        return {
            "kv_dtype": DTYPE_NAMES[self.scheme.dtype],
            "kv_scales": self.scheme.scales,
            "kv_largest": self.scheme.largest,
            "has_head_scales": bool(self.scales),
            "has_key_offset": bool(self.offset),
        }


def head_scales(scheme: KVScheme) -> list[Tensor]:
    """Of two KV heads, for k and v; none where tokens have scales."""
    if scheme.has_token_scales:
        return []
    return [torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.05])]


def cached(case: PagedCase, constants: Constants) -> KVState:
    """The case's context as codes; zeros where nothing was written, as the runtime allocates."""
    scheme = constants.scheme
    shape = (case.num_blocks, case.kv_heads, case.block_size)
    sides = [torch.zeros(shape) for _ in range(2 * scheme.has_token_scales)]
    codes = [torch.zeros(x.shape).to(scheme.dtype) for x in (case.keys, case.values)]
    state = KVState(*((x,) for x in codes), *((x,) for x in sides))  # type: ignore[arg-type]
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    written = torch.nonzero(flat[0][:, 0, 0].isfinite()).flatten()
    kv_write.evaluate(state, *(x[written] for x in flat), written, *constants.operands, slot=0)
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
