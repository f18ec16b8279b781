"""An artifact that is not what its maker wrote is refused in one line, and none of it is run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command, assert_refused, nothing_left_behind, octavo

from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError
from octavo.runtime.llm import LLM

REMEDY = "copy the artifact again or compile the model again"


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """An artifact that the test may damage."""
    return shutil.copytree(tiny_artifact, tmp_path / "artifact")


def assert_unusable(octavo_here: Command, artifact: Path, *words: str) -> None:
    """The command and LLM refuse it with the same words; nothing changes on the disk."""
    with nothing_left_behind(artifact.parent):
        done = octavo_here("generate", artifact, "-p", "hello", "--max-tokens", "4")
        assert_refused(done, str(artifact), *words)
        with pytest.raises(ArtifactError) as caught:
            LLM(artifact)
        assert str(caught.value) in done.stderr


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def files(artifact: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in artifact.glob(pattern) if path.is_file())
    assert found, f"no {pattern} in the artifact"
    return found


def test_a_whole_artifact_answers(octavo_here: Command, artifact: Path) -> None:
    with nothing_left_behind(artifact.parent):
        done = octavo_here("generate", artifact, "-p", "hello", "--max-tokens", "4")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "pattern",
    ["weights/*.safetensors", "weights/index.json", "program.py", "model/tokenizer.json", "ir/*"],
)
@pytest.mark.parametrize("place", [0, -1])
def test_a_changed_byte(octavo_here: Command, artifact: Path, pattern: str, place: int) -> None:
    path = files(artifact, pattern)[-1]
    flip_byte(path, place)
    name = path.relative_to(artifact).as_posix()
    assert_unusable(octavo_here, artifact, f"content of {name}", "SHA-256", REMEDY)


def test_a_changed_byte_in_each_file(artifact: Path) -> None:
    """Whatever an artifact holds is under its hash: no file of it is read on trust."""
    for path in files(artifact, "**/*"):
        content = path.read_bytes()
        flip_byte(path, len(content) // 2)
        with pytest.raises(ArtifactError, match=path.name):
            Artifact.open(artifact)
        path.write_bytes(content)
    Artifact.open(artifact)


def test_a_changed_program_is_not_run(artifact: Path, tmp_path: Path) -> None:
    with (artifact / "program.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'run')!r}, 'w')\n")
    assert_refused(octavo("generate", artifact, "-p", "hello"), "program.py has", "bytes", REMEDY)
    assert not (tmp_path / "run").exists()


def test_code_that_the_manifest_does_not_list(octavo_here: Command, artifact: Path) -> None:
    (artifact / "kernels" / "src").mkdir(parents=True, exist_ok=True)
    (artifact / "kernels" / "src" / "extra.py").write_text("raise SystemExit(3)")
    assert_unusable(octavo_here, artifact, "kernels/src/extra.py is code that the manifest", REMEDY)


@pytest.mark.parametrize("pattern", ["weights/*.safetensors", "program.py", "ir/*.ir"])
def test_a_cut_file(octavo_here: Command, artifact: Path, pattern: str) -> None:
    path = files(artifact, pattern)[0]
    size = path.stat().st_size
    os.truncate(path, size - 1)
    name = path.relative_to(artifact).as_posix()
    words = f"{name} has {size - 1} bytes, the manifest says {size}"
    assert_unusable(octavo_here, artifact, words, REMEDY)


@pytest.mark.parametrize("pattern", ["weights/*.safetensors", "program.py"])
def test_a_missing_file(octavo_here: Command, artifact: Path, pattern: str) -> None:
    path = files(artifact, pattern)[0]
    path.unlink()
    name = path.relative_to(artifact).as_posix()
    assert_unusable(octavo_here, artifact, f"{name} is missing", REMEDY)


Manifest = dict[str, object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(format=3), ["format 3", "upgrade octavo"]),
        (lambda body: body.update(required_features=["fp3"]), ["content id"]),
        (lambda body: body.update(max_position=10**6), ["content id"]),
        (lambda body: body.pop("files"), ["files", "missing"]),
    ],
    ids=["newer-format", "feature", "bound", "no-files"],
)
def test_a_changed_manifest(
    octavo_here: Command,
    artifact: Path,
    change: Callable[[Manifest], object],
    words: list[str],
) -> None:
    path = artifact / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    assert_unusable(octavo_here, artifact, "manifest.json", *words)


def test_a_cut_manifest(octavo_here: Command, artifact: Path) -> None:
    os.truncate(artifact / "manifest.json", 100)
    assert_unusable(octavo_here, artifact, "manifest.json", "not JSON")


def test_another_artifact_than_the_pinned_one(tiny_artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"its content id is sha256:.*, the pinned one is"):
        LLM(tiny_artifact, artifact_id="sha256:" + "0" * 64)
