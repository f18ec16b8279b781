"""A tiny llama that reads and writes text, as a checkpoint and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from filelock import FileLock

from tests.end_to_end.tiny_llama import write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(session_dir: Path) -> Path:
    """To read only."""
    folder = session_dir / "tiny-llama"
    with FileLock(session_dir / "tiny-llama.lock"):
        if not folder.exists():
            write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, session_dir: Path) -> Path:
    """The same, compiled for the cpu in float32. To read only."""
    from octavo.compile import compile_model

    artifact = session_dir / "tiny-llama-artifact"
    with FileLock(session_dir / "tiny-llama-artifact.lock"):
        if not artifact.exists():
            compile_model(tiny_checkpoint, artifact, target="cpu", progress=False)
    return artifact


@pytest.fixture
def octavo_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``octavo_here("inspect", path)``: the command, run in this process."""
    return Command(capfd, monkeypatch)
