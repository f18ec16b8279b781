"""Where a difference arises: what each module gives, in two models, for the same tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.evaluate.models import EvaluatedModel


@dataclass(frozen=True)
class ModuleError:
    """``|got - expected| / |expected|`` of what a module gives, all tokens together."""

    path: str
    error: float

    @property
    def is_layer(self) -> bool:
        """True for the residual stream after a layer: a path that ends in its number."""
        return re.search(r"(^|\.)\d+$", self.path) is not None


def module_errors(
    reference: EvaluatedModel, model: EvaluatedModel, ids: Sequence[int]
) -> list[ModuleError]:
    """The errors of the modules that both have by the same path and shape, in order."""
    expected = dict(reference.hidden(ids))
    found: dict[str, ModuleError] = {}
    for path, got in model.hidden(ids):
        want = expected.get(path)
        if want is not None and want.numel() == got.numel() and want.is_floating_point():
            found[path] = ModuleError(path, _relative(got, want))
    return list(found.values())


def _relative(got: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    gap = torch.linalg.vector_norm(got.double().reshape(wide.shape) - wide)
    return float(gap / torch.linalg.vector_norm(wide).clamp(min=1e-300))
