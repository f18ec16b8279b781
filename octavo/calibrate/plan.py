"""From what the user asked for to what the passes go by: recipe, text, and where codes lie."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.calibrate.auto import AutoRecipe, choose_recipe, require_room
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
from octavo.ir.graph import Graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.weight_cache import WeightSource
from octavo.passes.quant_recipe import Quantization
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
        self, quant: str | Path | None, *, quant_head: str | None = None, with_weights: bool = True
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
        if self.text is None and self.calibration.samples is not None:
            raise OctavoError(
                "--calibration-samples and --calibration-length are of a text: give --calibration"
                " FILE, or leave them out"
            )
        if self.text is not None and quant is None and quant_head is None:
            raise OctavoError("--calibration without --quant: say what to quantise to")
        if self.text is not None and not with_weights:
            raise OctavoError(
                "--calibration chooses codes, and --no-weights stores none: leave one of them out"
            )
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

    @property
    def runs_text(self) -> bool:
        """Whether the graph is run on a text."""
        return self.text is not None or self.budget_gb is not None

    def read_text(self) -> str:
        """The text, or the passage that comes with Octavo. Raises OctavoError."""
        return read_text("--calibration", self.text or PASSAGE)


def read_samples(
    request: CalibrationRequest, tokenizer: Tokenizer, max_position: int
) -> list[list[int]]:
    """Samples of the text as token ids, no longer than the model can take.

    Tells of fewer or shorter ones than were asked for; raises OctavoError where there is none.
    """
    asked = request.calibration.samples or CalibrationOptions()
    if request.text is None:
        asked = _PASSAGE_SAMPLES
    length = min(asked.length, max_position)
    ids = tokenizer.encode(request.read_text(), add_special_tokens=False)
    found = sample_windows(ids, replace(asked, length=length))
    if request.text is not None and (len(found), length) != (asked.num_samples, asked.length):
        logger.warning(
            "calibrating on %d samples of %d tokens, not on %d of %d: %s has %d tokens, and the"
            " model takes %d at most",
            *(len(found), length, asked.num_samples, asked.length),
            *(request.text.name, len(ids), max_position),
        )
    return found


@dataclass(frozen=True)
class Planned:
    """What the passes go by, the weights with what the calibration made, and the choices that a
    budget led to."""

    quantization: Quantization
    weights: WeightSource
    auto: AutoRecipe | None = None


def check_budget(
    budget_gb: float, imported: Imported, schemes: Sequence[QuantScheme], target: str
) -> None:
    """Raise OctavoError for a budget that no choice among ``schemes`` meets, before any is
    measured."""
    require_room(_before_quantization(imported, target), schemes, int(budget_gb * 1e9))


def plan_quantization(
    imported: Imported,
    weights: BoundWeights,
    quantization: Quantization,
    request: CalibrationRequest,
    *,
    target: str,
    sequences: Sequence[Sequence[int]],
    folder: Path,
    schemes: Sequence[QuantScheme],
    progress: Progress | None = None,
) -> Planned:
    """Choose a recipe, if a budget asks for it among ``schemes``, and codes, if there is a text.

    ``sequences`` are what ``read_samples`` made of the text. ``folder`` takes the codes and has to
    stay until the weights are written. Raises OctavoError.
    """
    auto = None
    if request.budget_gb is not None:
        graph = _before_quantization(imported, target)
        budget = int(request.budget_gb * 1e9)
        auto = choose_recipe(graph, weights, sequences, schemes, budget)
        quantization = replace(quantization, recipe=auto.recipe)
    if request.text is None:
        return Planned(quantization, weights, auto)
    store = CodeStore(folder, weights)
    graph = _before_quantization(imported, target)
    found = calibrate(graph, store, sequences, quantization, request.calibration, progress)
    return Planned(found, store, auto)


def _before_quantization(imported: Imported, target: str) -> Graph:
    return graph_before_quantization(
        imported.graph, max_position=imported.max_position, target=target
    )
