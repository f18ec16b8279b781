"""From a text to the offsets of keys of a KV cache in FP8."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from octavo.calibrate.calibrate import graph_before_quantization
from octavo.calibrate.key_offsets import find_key_offsets
from octavo.calibrate.sequences import CalibrationOptions, read_text, sample_windows
from octavo.frontend.trace import BoundWeights, Imported
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As You Like It from I.i to II.iii (William Shakespeare, 1623; public domain). Another text than
# the passage that losses are measured on.
KV_PASSAGE = Path(__file__).with_name("passage.txt")
# With one such sample 37 % of what rounding SmolLM2's keys does to softmaxes is left, with four 32.
_SAMPLES = CalibrationOptions(num_samples=8, length=1024)


def plan_key_offsets(
    imported: Imported,
    weights: BoundWeights,
    text: Path,
    *,
    target: str,
    tokenizer: Tokenizer | None,
) -> dict[int, Tensor] | None:
    """The offset of each slot's keys, ``{slot: f32[Hk, D]}``, by running the model on a text.

    None, with a notice, for a model that has no tokenizer. Raises OctavoError for a text that
    cannot be read or is shorter than a sample.
    """
    if tokenizer is None:
        logger.warning(
            "the model has no tokenizer, so no text can say which offsets to take off its keys:"
            " they become codes as they are, which loses more"
        )
        return None
    length = min(_SAMPLES.length, imported.max_position)
    ids = tokenizer.encode(read_text("--kv-calibration", text), add_special_tokens=False)
    sequences = sample_windows(ids, CalibrationOptions(_SAMPLES.num_samples, length))
    graph = graph_before_quantization(
        imported.graph, max_position=imported.max_position, target=target
    )
    return find_key_offsets(graph, weights, sequences)
