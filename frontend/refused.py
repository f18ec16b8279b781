"""The error for a model that cannot be compiled correctly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.ir.errors import OctavoError


class RefusedArchitecture(OctavoError):
    """A model that Octavo would get wrong, or cannot trace: its text is the one-line reason."""


class NoWeights(OctavoError):
    """A model without weights where they are read. ``found`` says so; the text says besides how
    such a model is compiled, which is no advice to whoever needs the weights themselves."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}; add the weights, or draw them with --random-weights SEED (in Python:"
            " compile_model(..., random_weights=SEED), whose artifact LLM takes)"
        )
        self.found = found


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """Put the model's type before the reason of any refusal inside."""
    try:
        yield
    except RefusedArchitecture as error:
        raise RefusedArchitecture(f"{model_type}: {error}") from error


def gist(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's and NumPy's own error and for PyTorch's, which is a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
