"""Octavo: a compiler for language models.

The names below are loaded when first used, so that ``import octavo`` costs nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.compile import compile_model
    from octavo.llm import LLM, AsyncLLM
    from octavo.runtime.beam_search import BeamSearchParams
    from octavo.runtime.outputs import CompletionOutput, RequestOutput
    from octavo.runtime.sampling_params import SamplingParams
    from octavo.runtime.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "GuidedDecodingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "compile_model",
]

# Names as text, not as imports: the import linter also sees imports inside functions, and through
# this file it would then see every part of the project import every other.
_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.llm",
    "BeamSearchParams": "octavo.runtime.beam_search",
    "CompletionOutput": "octavo.runtime.outputs",
    "GuidedDecodingParams": "octavo.runtime.structured_outputs",
    "RequestOutput": "octavo.runtime.outputs",
    "SamplingParams": "octavo.runtime.sampling_params",
    "StructuredOutputsParams": "octavo.runtime.structured_outputs",
    "compile_model": "octavo.compile",
}

# In a checkout `octavo.ir` is the folder `ir/` beside this one; in a wheel it lies below this one.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
