"""An artifact is whole, or it is refused with the name of the file and what to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.ir.errors import OctavoError
from octavo.runtime import artifact_files
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError
from tests.runtime.toy_artifact import PROGRAM, write_manifest, write_toy_artifact

WEIGHTS = "weights/weights-00001.safetensors"


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rename_entry(folder: Path, name: str) -> None:
    """List program.py under another name, with a content id that agrees."""
    files = Artifact.open(folder).manifest.files
    write_manifest(folder, files={**files, name: files["program.py"]})


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.py"
    shutil.move(folder / "program.py", outside)
    (folder / "program.py").symlink_to(outside)


def link_folder_out(folder: Path) -> None:
    shutil.move(folder / "kernels", folder.parent / "outside")
    (folder / "kernels").symlink_to(folder.parent / "outside")


def make_pipe(folder: Path) -> None:
    (folder / "program.py").unlink()
    os.mkfifo(folder / "program.py")


def write(folder: Path, name: str, text: str = "print('hello')") -> None:
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(text)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("changed program", lambda d: flip_byte(d / "program.py"), "content of program.py"),
    ("changed kernel", lambda d: flip_byte(d / "kernels/src/mix.py"), "kernels/src/mix.py"),
    ("changed weights", lambda d: flip_byte(d / WEIGHTS), f"content of {WEIGHTS}"),
    ("changed config", lambda d: flip_byte(d / "model/config.json"), "model/config.json"),
    ("cut weights", lambda d: cut(d / WEIGHTS), "has .* bytes, the manifest says"),
    ("cut manifest", lambda d: cut(d / "manifest.json"), "manifest.json: not JSON"),
    ("missing shard", lambda d: (d / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    ("missing manifest", lambda d: (d / "manifest.json").unlink(), "is not an artifact"),
    ("missing folder", shutil.rmtree, "does not exist"),
    ("newer format", lambda d: edit_manifest(d, format=99), "format 99.*upgrade octavo"),
    ("changed manifest", lambda d: edit_manifest(d, vocab_size=5), "content id"),
    ("no manifest", lambda d: (d / "manifest.json").write_text("[]"), "expected an object"),
    ("feature", lambda d: write_manifest(d, required_features=("warp",)), "needs warp.*upgrade"),
    ("dot dot", lambda d: rename_entry(d, "../program.py"), "not a plain path"),
    ("inner dot dot", lambda d: rename_entry(d, "a/../program.py"), "not a plain path"),
    ("absolute", lambda d: rename_entry(d, "/etc/passwd"), "not a plain path"),
    ("backslash", lambda d: rename_entry(d, "a\\b"), "not a plain path"),
    ("empty name", lambda d: rename_entry(d, ""), "not a plain path"),
    ("link out", link_out, "link that leads out"),
    ("folder out", link_folder_out, "link that leads out"),
    ("pipe", make_pipe, "not a regular file"),
    ("extra kernel", lambda d: write(d, "kernels/src/evil.py"), "kernels/src/evil.py is code"),
    ("extra binary", lambda d: write(d, "kernels/bin/sm_90/x.cubin"), "x.cubin is code"),
    ("extra init", lambda d: write(d, "__init__.py"), "__init__.py is code"),
    ("extra module", lambda d: write(d, "torch.py"), "torch.py is code"),
    ("extra library", lambda d: write(d, "program.so"), "program.so is code"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [d[1:] for d in DAMAGES], ids=[damage[0] for damage in DAMAGES]
)
def test_damage_is_refused_by_name(
    toy: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(toy)
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.open(toy)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OctavoError)


def test_a_whole_artifact_opens(toy: Path) -> None:
    artifact = Artifact.open(toy)
    assert artifact.manifest.model_type == "toy"
    assert artifact.model_file("config.json") == toy / "model/config.json"
    assert artifact.model_file("nothing.json") is None


@pytest.mark.parametrize(
    ("name", "expected"), [("f32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_both_spellings_of_a_dtype(toy: Path, name: str, expected: torch.dtype) -> None:
    write_manifest(toy, dtype=name)
    assert Artifact.open(toy).dtype == expected


def test_an_unknown_dtype(toy: Path) -> None:
    write_manifest(toy, dtype="nn")
    with pytest.raises(ArtifactError, match="unknown dtype 'nn'"):
        _ = Artifact.open(toy).dtype


def test_a_pinned_id_is_the_one_or_nothing_is_read(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Artifact.open(toy).manifest.artifact_id
    assert Artifact.open(toy, artifact_id=wanted).manifest.artifact_id == wanted
    monkeypatch.setattr(artifact_files, "sha256_of", lambda path: pytest.fail(f"read {path}"))
    with pytest.raises(ArtifactError, match="the pinned one is sha256:0000"):
        Artifact.open(toy, artifact_id="sha256:0000")


def test_weights_are_hashed_last(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_byte(toy / "program.py")
    read: list[str] = []
    real = artifact_files.sha256_of
    monkeypatch.setattr(
        artifact_files, "sha256_of", lambda path: read.append(path.name) or real(path)
    )
    with pytest.raises(ArtifactError, match=r"program\.py"):
        Artifact.open(toy)
    assert Path(WEIGHTS).name not in read


def test_without_verify_only_weights_are_believed(toy: Path) -> None:
    flip_byte(toy / WEIGHTS)
    Artifact.open(toy, verify=False)
    flip_byte(toy / "program.py")
    with pytest.raises(ArtifactError, match=r"program\.py"):
        Artifact.open(toy, verify=False)


def test_files_that_are_not_code_may_lie_about(toy: Path) -> None:
    write(toy, "notes.txt")
    write(toy, "kernels/src/__pycache__/mix.cpython-311.pyc")
    Artifact.open(toy)


def test_a_link_within_the_artifact_is_fine(toy: Path) -> None:
    shutil.move(toy / "program.py", toy / "real.txt")
    (toy / "program.py").symlink_to("real.txt")
    Artifact.open(toy)


def test_importing_writes_nothing_and_leaves_the_path_alone(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (toy / "program.py").write_text(PROGRAM + "# never imported before\n")
    write_manifest(toy)
    before = sorted(toy.rglob("*"))
    path = list(sys.path)
    program = Artifact.open(toy).load_program()
    assert getattr(program, "__name__", None) == "Program"
    assert sorted(toy.rglob("*")) == before
    assert sys.path == path


def test_two_artifacts_do_not_share_modules(tmp_path: Path) -> None:
    write_toy_artifact(tmp_path / "a")
    write_toy_artifact(tmp_path / "b", program=PROGRAM + "\nOTHER = True\n")
    first, second = (Artifact.open(tmp_path / name).load_program() for name in "ab")
    assert first is not second
    assert Artifact.open(tmp_path / "a").load_program() is first


def test_a_source_changed_after_the_check_is_not_run(toy: Path) -> None:
    with (toy / "program.py").open("a") as file:
        file.write("# only here\n")
    write_manifest(toy)
    artifact = Artifact.open(toy)
    flip_byte(toy / "kernels/src/mix.py")
    with pytest.raises(ArtifactError, match="has changed since it was checked"):
        artifact.load_program()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import a_package_that_is_not_there", "cannot be imported.*a_package_that"),
        ("x = 1", "defines no class Program"),
        ("from .kernels.src import other", "cannot be imported"),
        ("def (", "cannot be imported"),
    ],
)
def test_a_program_that_does_not_import(tmp_path: Path, program: str, message: str) -> None:
    write_toy_artifact(tmp_path / "a", program=program)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(tmp_path / "a").load_program()


def test_weights_come_lazily_by_name(toy: Path) -> None:
    weights = Artifact.open(toy).load_weights()
    assert list(weights) == ["salt"]
    assert torch.equal(weights["salt"], torch.zeros(260))
    with pytest.raises(KeyError):
        weights["pepper"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"salt": "../program.py"}}, "does not list"),
        ({"weight_map": {"salt": "other.safetensors"}}, "does not list"),
        ({}, "no weight_map"),
        ({"weight_map": {}, "shapes": {"salt": ["float32", [260]]}}, "compiled without weights"),
    ],
)
def test_an_index_that_leads_astray(toy: Path, index: dict[str, Any], message: str) -> None:
    (toy / "weights/index.json").write_text(json.dumps(index))
    write_manifest(toy)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(toy).load_weights()


def test_a_tensor_that_its_shard_does_not_hold(toy: Path) -> None:
    index = {"weight_map": {"pepper": "weights-00001.safetensors"}}
    (toy / "weights/index.json").write_text(json.dumps(index))
    write_manifest(toy)
    with pytest.raises(ArtifactError, match="pepper cannot be read"):
        Artifact.open(toy).load_weights()["pepper"]
