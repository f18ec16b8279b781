"""How long the phases of a start take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Seconds by phase, in order; they follow each other without gaps, so they add up.

    The seconds between two phases count for the one that comes.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; one that comes again adds to itself."""
        yield
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return ", ".join([*parts, f"total {self.total:.2f} s"])
