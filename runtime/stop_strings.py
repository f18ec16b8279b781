"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through until a stop string ends it.

    Held back is only what may still become a stop string: the longest end of the text that some
    stop string begins with.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is safe to show after this piece; sets ``matched`` when it ends here."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, self.matched = min(found, key=lambda hit: hit[0])  # the first listed of equals
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        num_held = self._num_possible(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _num_possible(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
