"""What tests of linears in Triton share: constants of modules, and what stands around a product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ir.ops.elementwise import ACTIVATIONS
from octavo.runtime.kernel import Workspace
from tests.tolerances import LINEAR_KERNEL, distance

PLAIN: dict[str, Any] = {
    "dtype": "bf16",
    "out_dtype": "bf16",
    "has_bias": False,
    "norm_eps": None,
    "activation": None,
    "softcap": None,
    "has_residual": False,
    "takes_sumsq": False,
    "emit_sumsq": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bias": {"has_bias": True},
    "norm": {"norm_eps": 1e-5},
    "sumsq": {"norm_eps": 1e-5, "takes_sumsq": True, "has_bias": True},
    "residual": {"has_residual": True},
    "emit": {"has_residual": True, "emit_sumsq": True, "has_bias": True},
    "gated": {"norm_eps": 1e-5, "takes_sumsq": True, "activation": "silu"},
    "capped residual": {"softcap": 5.0, "has_residual": True, "has_bias": True},
}


@cache
def workspace_on(device: torch.device) -> Workspace:
    """Scratch memory full of NaN."""
    workspace = Workspace.allocate(device)
    workspace.scratch.fill_(torch.nan)
    return workspace


def sumsq(x: Tensor) -> Tensor:
    """Sums of squares of each 64 columns, in float64."""
    return x.double().square().reshape(len(x), -1, 64).sum(-1)


def product(
    constants: Mapping[str, Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A product of float64, its norm already applied, and all that follows it."""
    y = F.linear(x, weight, None if bias is None else bias.double())
    if constants["activation"]:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[constants["activation"]](gate) * up
    if constants["softcap"] is not None:
        y = constants["softcap"] * torch.tanh(y / constants["softcap"])
    return y if residual is None else y + residual.double()


def check_sumsq(out: Tensor, sums: Tensor, first: int = 2) -> None:
    """Sums of squares of a result: written for ``first`` to 64 rows, left alone for others."""
    if first <= len(out) <= 64:
        assert distance(sums, sumsq(out)) <= LINEAR_KERNEL[torch.float32]
    else:
        assert sums.isnan().all()
