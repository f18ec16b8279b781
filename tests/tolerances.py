"""How far apart two computations of the same numbers may be: the one table.

Differences are measured as ``max |a - b| / max(1, max |b|)``: absolute for small values,
relative to the largest for large ones, since a sum's error grows with its largest terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

# After a rewrite that may change the order of sums and where intermediate results round, on graphs
# of a few nodes up to a model of a few tiny layers. Unit roundoff u times 2**7: sums of up to 128
# terms grow their error like sqrt(128) u = 11 u, and a dozen such results follow one another.
REWRITE: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53 * 2**7,
    torch.float32: 2.0**-24 * 2**7,
    # A handful of roundings in the residual stream show up whole, not averaged: 2**4 u.
    torch.bfloat16: 2.0**-9 * 2**4,
    torch.float16: 2.0**-11 * 2**4,
}

# A kernel over rows that computes in float32 and rounds its result: half an ulp is one u. Where it
# rounds in between as well, that may fall to the other side: three more. In float32 a sum over up
# to 1024 terms by a tree errs like its depth, 10 u, and exp, rsqrt and erf by 2 ulp.
ROW_KERNEL: dict[torch.dtype, float] = {
    torch.float32: 2.0**-24 * 2**5,
    torch.bfloat16: 2.0**-9 * 2**2,
    torch.float16: 2.0**-11 * 2**2,
}

# A linear in float32 with what is fused around it, for normal x and weights of variance 1 / K. Its
# result rounds once, and is up to 4 in size next to a scale of 1: a few u. Above 64 rows the normed
# rows, and gate and up, round as well: x by u each, averaged out in the sum, then u of each factor.
LINEAR_KERNEL: dict[torch.dtype, float] = {
    torch.float32: 2.0**-24 * 2**6,
    torch.bfloat16: 2.0**-9 * 2**3,
    torch.float16: 2.0**-11 * 2**3,
}

# The same in float32 for a model of 30 layers of hidden size 576: sums of up to 1536 terms err like
# sqrt(1536) u = 39 u, and 120 such results follow one another, which add up like their root, 11.
DEEP_REWRITE = 2.0**-24 * 2**9

# A token's score of logit and Gumbel noise in float32, for each unit of the largest logit or the
# temperature: eight roundings of values up to 23, and -log(1 - u) from u = 1/64 on, of which half
# of 2**-24 in 1 - u is 2**-19, and 2**-22, by which a GPU's log2 errs there, 2**-16.
SAMPLE_SCORE = 2.0**-24 * 23 * 8 + 2.0**-19 + 2.0**-16

# The share of the mass that a nucleus has, from two sums in float32, each of up to 32 roundings one
# after the other and a tree, of exponentials of arguments up to 20 that err by as many units.
NUCLEUS_MASS = 2.0**-24 * 2**7


def distance(got: Tensor, want: Tensor) -> float:
    """``max |got - want| / max(1, max |want|)``; infinite where just one is not finite."""
    if got.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    gap = torch.where(same, 0.0, (got - want).abs().nan_to_num(torch.inf, torch.inf))
    finite = want[want.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 1.0)
    return gap.max().item() / scale


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Integers and bools have to be equal, floats within REWRITE of their dtype."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not got.is_floating_point():
        assert torch.equal(got, want), f"{what}: integers differ"
        return
    gap = distance(got, want)
    limit = REWRITE[got.dtype]
    assert gap <= limit, f"{what}: differs by {gap:.3g}, at most {limit:.3g} expected"
