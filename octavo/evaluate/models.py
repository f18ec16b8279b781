"""What is compared: an artifact, by its own program, and a model of Hugging Face, eager."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octavo.evaluate.artifact_graph import graph_values
from octavo.frontend.cached_weights import CachedWeights
from octavo.frontend.meta_model import build_model
from octavo.frontend.reference import eager_model, model_logits, streamed_model
from octavo.frontend.refused import NoWeights
from octavo.frontend.source import ModelSource, open_weights, resolve
from octavo.frontend.weights import WeightSource
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.window_logits import WindowLogits


class EvaluatedModel(Protocol):
    """Whatever gives logits for token ids."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits ``f32[len, V]``."""
        ...

    def hidden(self, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """What modules give, ``[len, ...]``, by their paths below the model's base."""
        ...


class ArtifactModel:
    """An artifact. ``hidden`` interprets the last stage of its IR with the weights that it stores;
    logits come from its program."""

    def __init__(self, artifact: Artifact, max_tokens: int) -> None:
        self.artifact = artifact
        self._windows = WindowLogits(artifact, max_tokens)

    def logits(self, ids: Sequence[int]) -> Tensor:
        return torch.cat(list(self._windows.logits(ids)))

    def hidden(self, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        return graph_values(self.artifact, ids)


class HuggingFaceModel:
    """A model as Hugging Face's eager code computes it, in float32 whatever it is stored in.

    Weights are read when a module needs them; those that fit half of the free memory stay.
    """

    def __init__(self, config: Any, weights: WeightSource, model: Any) -> None:
        self._config, self._weights, self._model = config, weights, model

    def logits(self, ids: Sequence[int]) -> Tensor:
        found = model_logits(self._model, list(ids))
        if not bool(found.isnan().any()):
            return found
        # It reads weights of modules that do not run: then all have to be there.
        self._model = eager_model(self._config, torch.float32, self._weights)
        return model_logits(self._model, list(ids))

    def hidden(self, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        found: dict[str, Tensor] = {}
        base = f"{self._model.base_model_prefix}."
        handles = [
            module.register_forward_hook(_keeper(found, path.removeprefix(base)))
            for path, module in self._model.named_modules()
            if path and not isinstance(module, nn.ModuleList)
        ]
        try:
            self.logits(ids)
        finally:
            for handle in handles:
                handle.remove()
        yield from found.items()


def find_reference(model: str | Path) -> Artifact | ModelSource:
    """An artifact directory, or whatever ``octavo compile`` takes. Raises OctavoError."""
    if (Path(model) / "manifest.json").is_file():
        return Artifact.open(model)
    try:
        return resolve(model)
    except NoWeights as error:
        raise OctavoError(
            f"{error.found}: there is nothing to compare with; give --against a model directory"
            " with its weights, a .gguf file, a hub id or an artifact"
        ) from None


@contextmanager
def open_reference(found: Artifact | ModelSource, max_tokens: int) -> Iterator[EvaluatedModel]:
    """What ``find_reference`` found, ready to run."""
    if isinstance(found, Artifact):
        yield ArtifactModel(found, max_tokens)
        return
    with hugging_face(found) as model:
        yield model


@contextmanager
def hugging_face(source: ModelSource) -> Iterator[HuggingFaceModel]:
    """Hugging Face's model of a source."""
    shapes = build_model(source.config, torch.float32, attn_implementation="eager")
    stored = open_weights(source, shapes)
    weights = CachedWeights(stored, torch.float32, limit_bytes=_free_bytes() // 2)
    with streamed_model(source.config, torch.float32, weights) as model:
        yield HuggingFaceModel(source.config, stored, model)


def _keeper(found: dict[str, Tensor], path: str) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(result, Tensor):
            found[path] = result.flatten(0, 1) if result.dim() > 2 else result

    return keep


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
