"""The text that offsets of keys of a KV cache in FP8 are found with."""

from __future__ import annotations

import logging
from pathlib import Path

from octavo.calibrate.sequences import CalibrationOptions, read_text, sample_windows
from octavo.ir.errors import OctavoError
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As You Like It from I.i to II.iii (William Shakespeare, 1623; public domain). Another text than
# the passage that losses are measured on.
KV_PASSAGE = Path(__file__).with_name("passage.txt")
# With one such sample 37 % of what rounding SmolLM2's keys does to softmaxes is left, with four 32.
_SAMPLES = CalibrationOptions(num_samples=8, length=1024)


def read_kv_samples(
    text: Path, tokenizer: Tokenizer | None, max_position: int
) -> list[list[int]] | None:
    """Samples of a text as token ids, all of one length, which the model has positions for.

    None, with a notice, for a model that has no tokenizer. Raises OctavoError for a text that
    cannot be read or is shorter than a sample.
    """
    if tokenizer is None:
        logger.warning(
            "the model has no tokenizer, so no text can say which offsets to take off its keys:"
            " they become codes as they are, which loses more"
        )
        return None
    ids = tokenizer.encode(read_text("--kv-calibration", text), add_special_tokens=False)
    length = min(_SAMPLES.length, max_position)
    if len(ids) < length:
        raise OctavoError(
            f"--kv-calibration {text} has {len(ids)} tokens, expected at least {length}; give a"
            " longer text"
        )
    return sample_windows(ids, CalibrationOptions(_SAMPLES.num_samples, length))
