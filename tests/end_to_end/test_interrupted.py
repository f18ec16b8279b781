"""A compile that is cut off, by its user or by the machine, leaves nothing that looks whole."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import (
    OCTAVO,
    ROOT,
    Finished,
    assert_refused,
    let_be_interrupted,
    nothing_left_behind,
    octavo,
)

from octavo.compile import compile_model
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError

# How far a compile is: what it has written somewhere below the output's parent directory.
MOMENTS: dict[str, str] = {"begun": "*", "writing weights": "*.safetensors"}


class Compiling:
    """A compile in a process of its own, at work in ``output.parent``."""

    def __init__(self, model: Path, output: Path, *options: str) -> None:
        self._folder = output.parent
        self._before = set(self._folder.rglob("*"))
        self._process = subprocess.Popen(
            [*OCTAVO, "compile", str(model), "-o", str(output), "--target", "cpu", *options],
            cwd=ROOT,
            preexec_fn=let_be_interrupted,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, pattern: str) -> None:
        """Wait for a new file or directory of that name."""
        deadline = time.monotonic() + 120
        while not set(self._folder.rglob(pattern)) - self._before:
            assert self._process.poll() is None, f"ended too early: {self._process.communicate()}"
            assert time.monotonic() < deadline, f"no {pattern} appears"
            time.sleep(0.001)

    def end(self, signal_number: int) -> tuple[int, str, str]:
        """Send a signal; exit status, standard output and standard error."""
        self._process.send_signal(signal_number)
        out, err = self._process.communicate(timeout=60)
        return self._process.returncode, out, err


@pytest.mark.parametrize("pattern", MOMENTS.values(), ids=MOMENTS)
def test_ctrl_c(tiny_checkpoint: Path, tmp_path: Path, pattern: str) -> None:
    with nothing_left_behind(tmp_path):
        compiling = Compiling(tiny_checkpoint, tmp_path / "out")
        compiling.wait_for(pattern)
        assert compiling.end(signal.SIGINT) == (130, "", "octavo: interrupted\n")


def test_sigterm(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with nothing_left_behind(tmp_path):
        compiling = Compiling(tiny_checkpoint, tmp_path / "out")
        compiling.wait_for("*.safetensors")
        assert compiling.end(signal.SIGTERM) == (143, "", "")


def test_ctrl_c_under_force_leaves_the_old_artifact(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(tiny_artifact, tmp_path / "out")
    with nothing_left_behind(tmp_path):
        compiling = Compiling(tiny_checkpoint, output, "--force")
        compiling.wait_for("*.safetensors")
        assert compiling.end(signal.SIGINT) == (130, "", "octavo: interrupted\n")
    Artifact.open(output)


def test_kill(tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for pattern in MOMENTS.values():
        compiling = Compiling(tiny_checkpoint, output)
        compiling.wait_for(pattern)
        compiling.end(signal.SIGKILL)
        assert not output.exists()
    for folder in tmp_path.iterdir():
        with pytest.raises(ArtifactError):
            Artifact.open(folder)
    compile_model(tiny_checkpoint, output, target="cpu", progress=False)
    wanted = Artifact.open(tiny_artifact).manifest.artifact_id
    assert Artifact.open(output).manifest.artifact_id == wanted
    assert list(tmp_path.iterdir()) == [output], "what the killed ones left is still there"


def test_a_disk_without_space(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A file system of its own, smaller than the artifact, in a mount namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=300k none '{small}'"
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if _status([*namespace, "sh", "-c", mount]) != 0:
        pytest.skip("this machine does not let its tests mount a file system")
    # What is left on it goes to standard output, which a refusal leaves empty.
    script = f"{mount} && \"$@\"; status=$?; find '{small}' -mindepth 1; exit $status"
    command = [*OCTAVO, "compile", str(tiny_checkpoint), "-o", str(small / "out")]
    done = _run([*namespace, "sh", "-c", script, "sh", *command, "--target", "cpu"])
    assert_refused(done, f"no space left while writing {small}", "free some")


def test_a_file_that_may_not_grow(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The same where nothing can be mounted: a quota on the size of a file."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    with nothing_left_behind(tmp_path):
        output = tmp_path / "out"
        done = octavo(
            *("compile", tiny_checkpoint, "-o", output, "--target", "cpu"), preexec_fn=limit_files
        )
        assert_refused(done, f"{output} cannot be written: File too large")


def test_a_directory_that_may_not_be_written(tiny_checkpoint: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    # Root may write anywhere, unless it gives up the capabilities that let it.
    powers = "-dac_override,-dac_read_search"
    bounded = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"]
    prefix = bounded if os.geteuid() == 0 else []
    if _status([*prefix, "touch", str(locked / "file")]) == 0:
        pytest.skip("this user may write anywhere")
    with nothing_left_behind(tmp_path):
        output = locked / "out"
        command = [*OCTAVO, "compile", str(tiny_checkpoint), "-o", str(output), "--target", "cpu"]
        words = (f"no permission to write {output}", "choose a directory")
        assert_refused(_run([*prefix, *command]), *words)


def _run(command: list[str]) -> Finished:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def _status(command: list[str]) -> int | None:
    """The exit status, None where there is no such command."""
    run: Callable[..., Finished] = subprocess.run
    try:
        return run(command, capture_output=True, text=True).returncode
    except FileNotFoundError:
        return None
