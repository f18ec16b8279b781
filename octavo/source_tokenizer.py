"""The tokenizer of a model that is not compiled yet."""

from __future__ import annotations

import tempfile
from pathlib import Path

from octavo.frontend.model_files import write_model_files
from octavo.frontend.source import ModelSource
from octavo.runtime.tokenizer import Tokenizer


def source_tokenizer(source: ModelSource) -> Tokenizer | None:
    """As an artifact of the model would have it; None for a model without one.

    Raises OctavoError when it cannot be converted.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model_files(source, Path(folder))
        if not (Path(folder) / "tokenizer.json").is_file():
            return None
        return Tokenizer.from_directory(folder)
