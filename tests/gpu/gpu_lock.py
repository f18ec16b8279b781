"""One GPU among several test processes: side by side, or one alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def share_of_gpu(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the GPU together with others, or ``alone``; ``folder`` is one that all processes see.

    Who waits to be alone keeps later ones from starting, or it would wait for ever.
    """
    with (folder / "gpu.turn").open("w") as turn, (folder / "gpu.lock").open("w") as lock:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield
