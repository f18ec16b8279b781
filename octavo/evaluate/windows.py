"""A text as windows of one length, each token of it predicted once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.ir.errors import OctavoError

# Chapters IV and V of Alice's Adventures in Wonderland (Lewis Carroll, 1865; public domain).
PASSAGE = Path(__file__).with_name("passage.txt")


@dataclass(frozen=True)
class WindowOptions:
    """Windows of ``context`` tokens that begin ``stride`` tokens after one another, of at most
    ``max_tokens`` tokens of the text. With a stride below the context, tokens are predicted from
    at least ``context - stride`` others."""

    context: int = 512
    stride: int = 512
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.context or self.context < 2:
            raise OctavoError(
                f"a stride of {self.stride} with a context of {self.context}: expected a context of"
                " at least 2 tokens, and a stride from 1 to it"
            )


@dataclass(frozen=True)
class Window:
    """Tokens that a model is given, and the first one that is predicted here."""

    ids: tuple[int, ...]
    first: int


def windows(ids: Sequence[int], options: WindowOptions) -> Iterator[Window]:
    """Windows in which each token is predicted once, but the first of the text and, where windows
    do not overlap, of each window. Raises OctavoError for a text of fewer than two tokens."""
    ids = ids[: options.max_tokens]
    if len(ids) < 2:
        raise OctavoError(f"the text has {len(ids)} tokens; at least two are needed")
    done = 0
    for start in range(0, len(ids), options.stride):
        window = tuple(ids[start : start + options.context])
        first = max(1, done - start)
        if first < len(window):
            yield Window(window, first)
        done = start + len(window)
        if done == len(ids):
            return
