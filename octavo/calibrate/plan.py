"""From what the user asked for to what the passes go by: recipe, text, and where codes lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.calibrate.auto import AutoRecipe, choose_recipe
from octavo.calibrate.calibrate import (
    Calibration,
    Progress,
    calibrate,
    graph_before_quantization,
)
from octavo.calibrate.code_store import CodeStore
from octavo.calibrate.sequences import CalibrationOptions, read_text, sample_windows
from octavo.evaluate.windows import PASSAGE
from octavo.frontend.trace import BoundWeights, Imported
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.weight_cache import WeightSource
from octavo.passes.quant_recipe import Quantization
from octavo.runtime.tokenizer import Tokenizer

AUTO = "auto"
# What a budget is spent on; those that a target has no kernel for are left out.
AUTO_SCHEMES = ("int4-g128", "int4-g64", "int4-g32", "int8", "fp8")
# Of the passage that comes with Octavo, where no text is given.
_PASSAGE_SAMPLES = CalibrationOptions(num_samples=8, length=512)


@dataclass(frozen=True)
class CalibrationRequest:
    """What ``compile_model`` is asked for besides a recipe.

    ``text`` is a UTF-8 file, ``calibration`` says how codes are chosen from it; without a text
    they are rounded to nearest. ``budget_gb`` is of all weights, in 10^9 bytes, and goes with
    ``--quant auto``.
    """

    text: Path | None = None
    calibration: Calibration = field(default_factory=lambda: Calibration("rtn"))
    budget_gb: float | None = None

    def check(
        self, quant: str | None, *, quant_head: str | None = None, with_weights: bool = True
    ) -> None:
        """Raise OctavoError for parts that do not go together, and for a text that cannot be
        read."""
        self._check_budget(quant == AUTO, quant_head, with_weights)
        method = self.calibration.method
        if self.text is None and method != "rtn":
            raise OctavoError(f"--quant-method {method} needs text: give --calibration FILE")
        if self.calibration.gptq.act_order and method != "gptq":
            raise OctavoError(
                f"--act-order is of GPTQ, and codes are chosen by {method}: give --calibration FILE"
                " without another --quant-method, or leave it out"
            )
        if self.text is not None and quant is None:
            raise OctavoError("--calibration without --quant: say what to quantise to")
        self.read_text()

    def _check_budget(self, is_auto: bool, quant_head: str | None, with_weights: bool) -> None:
        budget = self.budget_gb
        if is_auto != (budget is not None):
            raise OctavoError("--quant auto and --budget-gb go together: one says what for")
        if budget is not None and not 0 < budget < math.inf:
            raise OctavoError(f"--budget-gb {budget}: expected gigabytes, a number above zero")
        if is_auto and quant_head is not None:
            raise OctavoError(
                "--quant auto leaves the LM head as it is: add the line"
                f" `lm_head: {quant_head}` to the recipe that it writes, and compile with that"
            )
        if is_auto and not with_weights:
            raise OctavoError("--quant auto measures the weights: leave --no-weights out")

    def read_text(self) -> str:
        """The text, or the passage that comes with Octavo. Raises OctavoError."""
        return read_text("--calibration", self.text or PASSAGE)


@dataclass(frozen=True)
class Planned:
    """What the passes go by, the weights with what the calibration made, and the choices that a
    budget led to."""

    quantization: Quantization
    weights: WeightSource
    auto: AutoRecipe | None = None


def plan_quantization(
    imported: Imported,
    weights: BoundWeights,
    quantization: Quantization,
    request: CalibrationRequest,
    *,
    target: str,
    tokenizer: Tokenizer | None,
    folder: Path,
    schemes: Sequence[QuantScheme],
    progress: Progress | None = None,
) -> Planned:
    """Choose a recipe, if a budget asks for it among ``schemes``, and codes, if there is a text.

    ``folder`` takes the codes and has to stay until the weights are written. Raises OctavoError.
    """
    sequences = _sequences(request, tokenizer, imported.max_position)

    auto = None
    if request.budget_gb is not None:
        graph = graph_before_quantization(
            imported.graph, max_position=imported.max_position, target=target
        )
        budget = int(request.budget_gb * 1e9)
        auto = choose_recipe(graph, weights, sequences, schemes, budget)
        quantization = replace(quantization, recipe=auto.recipe)
    if request.text is None:
        return Planned(quantization, weights, auto)
    graph = graph_before_quantization(
        imported.graph, max_position=imported.max_position, target=target
    )
    store = CodeStore(folder, weights)
    found = calibrate(graph, store, sequences, quantization, request.calibration, progress)
    return Planned(found, store, auto)


def _sequences(
    request: CalibrationRequest, tokenizer: Tokenizer | None, max_position: int
) -> list[list[int]]:
    """Samples of the text, no longer than the model can take."""
    if tokenizer is None:
        raise OctavoError("the model has no tokenizer: no text can calibrate it")
    options = _PASSAGE_SAMPLES if request.text is None else request.calibration.samples
    options = replace(options, length=min(options.length, max_position))
    ids = tokenizer.encode(request.read_text(), add_special_tokens=False)
    return sample_windows(ids, options)
