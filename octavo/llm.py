"""The LLM of the front door: takes a model as well as an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.ir.types import DTYPES
from octavo.quantization_keyword import settle_quantization
from octavo.runtime.artifact import Artifact
from octavo.runtime.async_llm import AsyncLLM as ArtifactAsyncLLM
from octavo.runtime.llm import LLM as ArtifactLLM
from octavo.runtime.llm import check_model
from octavo.runtime.llm_options import LLMOptions


class LLM(ArtifactLLM):
    """A language model, ready to generate.

    ``model`` is an artifact directory, or what ``octavo compile`` takes: a model directory, a GGUF
    file or a hub id, which is then compiled once into a cache. Keywords are vLLM's;
    ``quantization`` says what a model is compiled with, or how its checkpoint comes quantised.
    """

    def __init__(self, model: str | Path, **keywords: Any) -> None:
        """Raises what compiling raises, and what loading does."""
        asked = keywords.get("quantization")
        if isinstance(asked, str):
            check_model(model)
            revision = keywords.get("revision")
            keywords["quantization"] = settle_quantization(model, asked, revision)
        super().__init__(model, **keywords)

    def open_artifact(self, model: str | Path, options: LLMOptions) -> Artifact:
        """The artifact itself, or the one that the model compiles to."""
        path = Path(model).expanduser()
        if not (path / "manifest.json").is_file():
            dtype = str(DTYPES[options.dtype]).removeprefix("torch.") if options.dtype else "auto"
            # Here and not above: an artifact loads without the seconds that the compiler takes.
            from octavo.artifact_cache import compiled

            path = compiled(
                model,
                dtype=dtype,
                quant=options.quantization,
                kv_cache_dtype=options.kv_cache_dtype or "auto",
                revision=options.revision,
            )
        return super().open_artifact(path, options)


class AsyncLLM(ArtifactAsyncLLM):
    """The same for an event loop, see octavo.runtime.async_llm."""

    llm_class = LLM
