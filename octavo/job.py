"""What one compile works on and with, for all its phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.calibrate.plan import CalibrationRequest
from octavo.codegen.artifact import ArtifactWriter
from octavo.codegen.target import Targets
from octavo.frontend.source import ModelSource
from octavo.kv_options import KVOptions
from octavo.passes.quant_recipe import Quantization, Recipe
from octavo.phases import Phases
from octavo.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """What one compile works on and with. ``tokenizer`` is there where a text calibrates."""

    source: ModelSource
    dtype: torch.dtype
    targets: Targets
    writer: ArtifactWriter
    phases: Phases
    with_weights: bool
    recipe: Recipe | None
    calibration: CalibrationRequest
    tokenizer: Tokenizer | None
    loss_tokens: int | None
    dequantize: bool
    kv: KVOptions

    @property
    def quantization(self) -> Quantization:
        """What was asked for, which a calibration or a budget adds to."""
        target = self.targets.main
        return Quantization(
            self.recipe, why_no_kernel=target.why_no_kernel, can_embed=target.can_embed
        )
