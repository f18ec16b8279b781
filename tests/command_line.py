"""The octavo command as a user runs it, and what a refusal has to look like."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
OCTAVO = (sys.executable, "-m", "octavo")

Finished = subprocess.CompletedProcess[str]


def octavo(*arguments: str | Path, **options: Any) -> Finished:
    """Run the command in a process of its own; ``options`` are those of subprocess.run."""
    defaults: dict[str, Any] = {"cwd": ROOT, "timeout": 120}
    command = [*OCTAVO, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **{**defaults, **options}
    )


def let_be_interrupted() -> None:
    """For ``preexec_fn``: a job in the background of a shell ignores Ctrl-C, and so do its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """The command, run in this process: the same ``main``, without seconds of imports."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._patch = patch

    def __call__(self, *arguments: str | Path) -> Finished:
        argv = ["octavo", *map(str, arguments)]
        self._patch.setattr(sys, "argv", argv)
        self._capture.readouterr()
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = self._capture.readouterr()
        return subprocess.CompletedProcess(argv, int(exited.value.code or 0), out, err)


def assert_refused(done: Finished, *words: str) -> None:
    """One line on stderr with those words, nothing on stdout, exit status 2."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert_one_line(done.stderr, "octavo: error: ", *words)


def assert_one_line(text: str, start: str, *words: str) -> None:
    """One line that begins with ``start`` and has all the words."""
    assert text.startswith(start), text
    assert text.count("\n") == 1, text
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


@contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Below ``folder`` is afterwards what was there before: names, sizes and times of change."""
    before = _listing(folder)
    yield
    after = _listing(folder)
    assert after == before, f"changed: {after.items() ^ before.items()}"


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found.items()}
