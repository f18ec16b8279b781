"""The tests of tests/templates/triton/test_quant_linear.py on the GPU, and more draws of them."""

from __future__ import annotations

import pytest

from tests.rendered_kernel import arch_here
from tests.templates.triton.test_quant_linear import *  # noqa: F403
from tests.templates.triton.test_quant_linear import FP8, INT4, INT8, VARIANTS, _case, _module

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", [INT4, FP8, INT8])
@pytest.mark.parametrize(
    ("n", "k", "variant"),
    [(6144, 4096, "sumsq"), (4096, 4096, "emit"), (2048, 4096, "gated"), (4096, 14336, "emit")],
)
@pytest.mark.parametrize("rows", [1, 5, 64, 200, 700])
def test_real_shapes(scheme: str, n: int, k: int, variant: str, rows: int) -> None:
    """Every candidate for so many rows, several draws of each: a race need not show at once."""
    module = _module(scheme, n, k, **VARIANTS[variant])
    bucket = module.CHOICES.bucket(rows)
    cases = [_case(module, rows, seed=seed) for seed in range(2)]
    copies = [case.buffers["out"].clone() for case in cases]  # the residual, where there is one
    try:
        for candidate in bucket.candidates:
            module.CHOICES.choose(bucket.name, candidate)
            for _ in range(4):
                for case, copy in zip(cases, copies, strict=True):
                    case.buffers["out"].copy_(copy)
                    case.check(candidate["how"])
    finally:
        module.CHOICES.reset(arch_here())
