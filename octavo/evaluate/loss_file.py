"""The figures of a short text that a quantised artifact carries: tests/loss.json.

Below tests/, since their last bits depend on the machine: they do not enter the content id.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from octavo.evaluate.distributions import Loss
from octavo.evaluate.evaluate import compare, read_tokens
from octavo.evaluate.models import ArtifactModel, hugging_face
from octavo.evaluate.windows import PASSAGE, WindowOptions
from octavo.frontend.source import ModelSource
from octavo.runtime.artifact import Artifact

LOSS_FILE = "tests/loss.json"


def measure_loss(directory: Path, source: ModelSource, num_tokens: int) -> str | None:
    """The text of tests/loss.json: an artifact against its source, on the first ``num_tokens`` of
    the passage that comes with Octavo. None without a tokenizer.

    The model runs in float32, streamed: two operations for each parameter and token.
    """
    artifact = Artifact.open(directory)
    if artifact.model_file("tokenizer.json") is None:
        return None
    context = min(WindowOptions().context, artifact.manifest.max_position)
    options = WindowOptions(context, context, num_tokens)
    ids = read_tokens(artifact, PASSAGE)
    model = ArtifactModel(artifact, context)
    with hugging_face(source) as reference:
        found = compare(model, reference, ids, options, with_modules=False)
    return _text(found.loss, options)


def _text(loss: Loss, options: WindowOptions) -> str:
    body = {
        "text": PASSAGE.name,
        "context": options.context,
        **dataclasses.asdict(loss),
        "perplexity_increase": loss.perplexity_increase,
    }
    return json.dumps(body, indent=1) + "\n"
