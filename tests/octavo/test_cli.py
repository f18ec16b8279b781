"""The command line: version, help, and one clear line for each error of the user."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ROOT, assert_refused, let_be_interrupted, octavo


def test_version() -> None:
    done = octavo("--version")
    assert (done.returncode, done.stdout) == (0, "octavo 0.1.0\n")


@pytest.mark.parametrize("command", ["compile", "generate", "chat", "inspect", "bench", "tune"])
def test_help_has_an_example(command: str) -> None:
    done = octavo(command, "--help")
    assert done.returncode == 0
    assert f"octavo {command} " in done.stdout.split("Examples:")[1]


def test_no_command_is_refused() -> None:
    assert_refused(octavo(), "Missing command", "octavo --help")


def test_an_unknown_command_is_refused() -> None:
    assert_refused(octavo("decompile"), "decompile")


def test_an_unknown_option_names_the_help_of_its_command() -> None:
    assert_refused(octavo("chat", "x", "--nope"), "--nope", "octavo chat --help")


@pytest.mark.parametrize("option", [["--stage"], ["--diff", "0"], ["--diff"]])
def test_too_few_values_of_an_option_name_the_help_of_its_command(option: list[str]) -> None:
    assert_refused(octavo("inspect", "x", *option), option[0], "octavo inspect --help")


def test_a_missing_prompt_is_refused() -> None:
    assert_refused(octavo("generate", "x"), "--prompt")


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    assert_refused(octavo("compile", "x", "-o", "y", "--dtype", "int3"), "int3", "bfloat16")


@pytest.mark.parametrize("command", [["chat"], ["inspect"], ["tune"], ["generate", "-p", "hi"]])
def test_an_artifact_that_does_not_exist_is_refused(command: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert_refused(octavo(*command, missing), missing, "no such directory", "octavo compile")


@pytest.mark.parametrize("command", [["chat"], ["inspect"], ["tune"], ["generate", "-p", "hi"]])
def test_a_directory_that_is_no_artifact_is_refused(command: list[str], tmp_path: Path) -> None:
    assert_refused(octavo(*command, str(tmp_path)), str(tmp_path), "manifest.json")


def test_a_system_error_is_one_line_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "manifest.json").chmod(0)
    script = (
        "from pathlib import Path; from octavo.cli import artifact, main\n"
        "def denied(directory): raise PermissionError(13, 'Permission denied', 'there/weights')\n"
        "artifact.read_manifest = denied\n"
        f"import sys; sys.argv = ['octavo', 'inspect', {str(tmp_path)!r}]; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert_refused(done, "there/weights: Permission denied")


def test_ctrl_c_is_one_line_and_status_130(tmp_path: Path) -> None:
    script = (
        "import time, sys; from octavo.cli import artifact, main\n"
        "def slow(directory): print('started', flush=True); time.sleep(60)\n"
        "artifact.read_manifest = slow\n"
        "sys.argv = ['octavo', 'inspect', 'x']; main.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        preexec_fn=let_be_interrupted,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "octavo: interrupted\n")


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    done = octavo("inspect", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_version_and_help_are_quick() -> None:
    for arguments in (["--version"], ["--help"], ["compile", "--help"]):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            octavo(*arguments)
            times.append(time.perf_counter() - start)
        # The promise is half a second; the rest is for a machine that also runs other tests.
        assert min(times) < 1.5
