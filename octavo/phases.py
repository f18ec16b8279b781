"""The phases of a long job: timed, and shown on a terminal while they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phases:
    """Times named phases; the line on the terminal vanishes when the job is done.

    ``seconds`` lists ``(name, seconds)`` in order. Nothing is shown when standard error is not a
    terminal or ``visible`` is false.
    """

    def __init__(self, *, visible: bool) -> None:
        self.seconds: list[tuple[str, float]] = []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not (visible and sys.stderr.isatty()),
        )

    @contextmanager
    def shown(self) -> Iterator[Phases]:
        """Show the line while the job runs."""
        with self._progress:
            yield self

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time one phase; gives a function that is told how many things are done, of how many."""
        task = self._progress.add_task(name, total=None)
        start = time.perf_counter()

        def tell(done: int, total: int) -> None:
            self._progress.update(task, description=f"{name}: {done} of {total}")

        try:
            yield tell
        finally:
            self.seconds.append((name, time.perf_counter() - start))
            self._progress.remove_task(task)
