"""From what the user asked for to what the passes go by: recipe, text, and where codes lie."""

from __future__ import annotations

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
from octavo.calibrate.sequences import CalibrationOptions, sample_windows
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

    def check(self, quant: str | None) -> None:
        """Raise OctavoError for parts that do not go together."""
        if (quant == AUTO) != (self.budget_gb is not None):
            raise OctavoError("--quant auto and --budget-gb go together: one says what for")
        if self.text is None and self.calibration.method != "rtn":
            raise OctavoError(
                f"--quant-method {self.calibration.method} needs text: give --calibration FILE"
            )
        if self.text is not None and quant is None:
            raise OctavoError("--calibration without --quant: say what to quantise to")


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
    path, options = request.text, request.calibration.samples
    if path is None:
        path, options = PASSAGE, _PASSAGE_SAMPLES
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"--calibration {path} cannot be read as UTF-8 text: {error}") from None
    options = replace(options, length=min(options.length, max_position))
    return sample_windows(tokenizer.encode(text, add_special_tokens=False), options)
