"""An artifact against a reference: one pass over a text, a window at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.evaluate.comparable import check_comparable, identify_artifact, identify_source
from octavo.evaluate.distributions import Loss, LossMeter
from octavo.evaluate.models import (
    ArtifactModel,
    EvaluatedModel,
    find_reference,
    open_reference,
)
from octavo.evaluate.modules import ModuleError, module_errors
from octavo.evaluate.windows import PASSAGE, WindowOptions, windows
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Whoever compares modules holds all that they give at once.
_MODULE_TOKENS = 128

Progress = Callable[[int, int], None]  # windows compared, windows in all


@dataclass(frozen=True)
class Evaluation:
    """What was found: the loss, and the errors of modules, in order; none if not asked for."""

    loss: Loss
    modules: tuple[ModuleError, ...]

    @property
    def layers(self) -> list[ModuleError]:
        """Of the residual stream after each layer."""
        return [module for module in self.modules if module.is_layer]

    def worst(self, count: int) -> list[ModuleError]:
        """The modules within layers with the largest errors."""
        inner = [module for module in self.modules if not module.is_layer]
        return sorted(inner, key=lambda module: -module.error)[:count]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
        return {
            **dataclasses.asdict(self.loss),
            "perplexity_increase": self.loss.perplexity_increase,
            "modules": {module.path: module.error for module in self.modules},
        }


def evaluate(
    directory: str | Path,
    against: str | Path,
    *,
    text: str | Path | None = None,
    options: WindowOptions | None = None,
    with_modules: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare an artifact with the model that it was made of, or with another artifact.

    ``text`` is a UTF-8 file; None is a passage that comes with Octavo, some 7,000 tokens. A model
    runs in float32 whatever it is stored in. Models of different architectures are compared with a
    notice. Raises OctavoError, also where the vocabularies differ.
    """
    options = options or WindowOptions()
    artifact = Artifact.open(directory)
    found = find_reference(against)
    other = identify_artifact(found) if isinstance(found, Artifact) else identify_source(found)
    for notice in check_comparable(identify_artifact(artifact), other, options.context):
        logger.warning("%s", notice)
    ids = read_tokens(artifact, Path(text) if text is not None else PASSAGE)
    model = ArtifactModel(artifact, options.context)
    with open_reference(found, options.context) as reference:
        return compare(model, reference, ids, options, with_modules, progress)


def read_tokens(artifact: Artifact, path: Path) -> list[int]:
    """A text file's tokens, by the artifact's tokenizer, without special ones."""
    tokenizer = Tokenizer.from_artifact(artifact)
    if tokenizer is None:
        raise OctavoError(f"{artifact.root} has no tokenizer: no text can be evaluated")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"{path} cannot be read as UTF-8 text: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False)


def compare(
    model: EvaluatedModel,
    reference: EvaluatedModel,
    ids: Sequence[int],
    options: WindowOptions,
    with_modules: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare on token ids two models that ``check_comparable`` has let pass."""
    meter, every = LossMeter(), list(windows(ids, options))
    for count, window in enumerate(every):
        rows = slice(window.first - 1, len(window.ids) - 1)
        targets = torch.tensor(window.ids[window.first :])
        meter.add(reference.logits(window.ids)[rows], model.logits(window.ids)[rows], targets)
        if progress is not None:
            progress(count + 1, len(every))
    sample = ids[: min(_MODULE_TOKENS, options.context)]
    errors = module_errors(reference, model, sample) if with_modules else []
    return Evaluation(meter.loss(), tuple(errors))
