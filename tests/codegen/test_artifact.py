"""An artifact is whole or not there, and nobody else's directory is touched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.codegen.artifact import ArtifactWriter, list_files
from octavo.codegen.generate import generate
from octavo.codegen.target import resolve_target
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import Manifest
from octavo.ir.random_inputs import RandomSource
from tests.codegen.llama import llama

FIELDS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "target": "cpu",
    "dtype": "f32",
    "vocab_size": 64,
    "max_position": 16,
}


def compile_llama(output: Path, *, force: bool = False) -> Manifest:
    graph = llama(layers=2)
    with ArtifactWriter(output, force=force) as writer:
        writer.begin()
        cpu = resolve_target("cpu")
        generated = generate(graph, cpu, writer.directory, RandomSource(graph))
        return writer.finish(kv_slots=generated.kv_slots, **FIELDS)


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_finished_artifact_lists_its_files(tmp_path: Path) -> None:
    manifest = compile_llama(tmp_path / "out")
    read = Manifest.from_json((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    assert read == manifest
    on_disk = {p for p in listing(tmp_path / "out") if (tmp_path / "out" / p).is_file()}
    assert on_disk == {*manifest.files, "manifest.json"}
    assert {manifest.files[p].role for p in ("program.py", "plans/memory.json")} == {
        "program",
        "plan",
    }
    assert listing(tmp_path)[0] == "out", "nothing is left beside it"


def test_a_file_added_at_the_end_is_listed_as_the_others_are(tmp_path: Path) -> None:
    graph = llama(layers=2)
    with ArtifactWriter(tmp_path / "out") as writer:
        writer.begin()
        generated = generate(graph, resolve_target("cpu"), writer.directory, RandomSource(graph))
        before = writer.finish(kv_slots=generated.kv_slots, **FIELDS)
        after = writer.add_text(before, "tests/loss.json", "{}\n")
    assert after.files == list_files(tmp_path / "out")
    assert after.artifact_id == before.artifact_id
    assert Manifest.from_json((tmp_path / "out" / "manifest.json").read_text("utf-8")) == after


def test_same_input_gives_the_same_artifact(tmp_path: Path) -> None:
    one, two = (compile_llama(tmp_path / name) for name in ("one", "two"))
    assert one.artifact_id == two.artifact_id
    assert one.files == two.files


def test_missing_parents_are_made(tmp_path: Path) -> None:
    compile_llama(tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "manifest.json").is_file()


def test_nothing_is_made_before_the_body_can_be_interrupted(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a" / "out"):
        assert listing(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def compile_in_part() -> None:
        with ArtifactWriter(tmp_path / "a" / "out") as writer:
            writer.begin()
            writer.write_text("program.py", "x = 1\n")
            raise error

    with pytest.raises(error):
        compile_in_part()
    assert listing(tmp_path) == []


def test_leaving_without_finish_leaves_nothing_behind(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as writer:
        writer.begin()
        writer.write_text("program.py", "x = 1\n")
    assert listing(tmp_path) == []


def test_existing_output_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OctavoError, match=r"exists; .*--force"), ArtifactWriter(tmp_path / "out"):
        pass
    assert listing(tmp_path) == ["out"]


def test_force_replaces_an_artifact_only_at_the_end(tmp_path: Path) -> None:
    compile_llama(tmp_path / "out")
    before = listing(tmp_path)
    (tmp_path / "out" / "extra.txt").write_text("mine")
    with pytest.raises(ValueError, match="half way"), ArtifactWriter(tmp_path / "out", force=True):
        raise ValueError("half way")
    assert (tmp_path / "out" / "extra.txt").exists()
    compile_llama(tmp_path / "out", force=True)
    assert listing(tmp_path) == before


def test_force_replaces_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    compile_llama(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.parametrize("make", ["directory", "file", "link"])
def test_force_never_touches_what_is_no_artifact(tmp_path: Path, make: str) -> None:
    output = tmp_path / "out"
    if make == "file":
        output.write_text("mine")
    else:
        goal = output if make == "directory" else tmp_path / "goal"
        goal.mkdir()
        (goal / "thesis.txt").write_text("mine")
        if make == "link":
            output.symlink_to(goal)
    before = listing(tmp_path)
    reason = {"directory": "is not an artifact", "file": "is not a directory", "link": "is a link"}
    message = f"{reason[make]}.*--force"
    with pytest.raises(OctavoError, match=message), ArtifactWriter(output, force=True):
        pass
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "no space left"), (errno.EACCES, "no permission"), (errno.EIO, "cannot be")],
)
def test_trouble_with_the_disk_is_one_line(tmp_path: Path, number: int, message: str) -> None:
    with (
        pytest.raises(OctavoError, match=message) as caught,
        ArtifactWriter(tmp_path / "out") as writer,
    ):
        raise OSError(number, os.strerror(number), str(writer.directory / "x"))
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == []


def test_a_real_full_disk_is_one_line(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    with (
        pytest.raises(OctavoError, match="no space left"),
        ArtifactWriter(tmp_path / "out"),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 100_000)
    assert listing(tmp_path) == []


def test_errors_that_are_not_about_the_output_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ArtifactWriter(tmp_path / "out"):
        (tmp_path / "model.safetensors").read_bytes()


def test_a_parent_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OctavoError, match="cannot be written"):
        ArtifactWriter(tmp_path / "file" / "out").begin()


def test_stages_are_written_without_times(tmp_path: Path) -> None:
    missed = SimpleNamespace(where="%x", reason="its input is not an add")
    stage = SimpleNamespace(
        number=3,
        name="fuse-add-norm",
        text="graph @g() {\n}\n",
        rewrites=2,
        missed=(missed,),
        num_nodes=7,
        seconds=1.5,
    )
    with ArtifactWriter(tmp_path / "out") as writer:
        writer.begin()
        writer.write_stages([stage])
        assert (writer.directory / "ir/03-fuse-add-norm.ir").read_text() == stage.text
        index = json.loads((writer.directory / "ir/index.json").read_text())
    assert index == {
        "stages": [
            {
                "number": 3,
                "name": "fuse-add-norm",
                "file": "03-fuse-add-norm.ir",
                "rewrites": 2,
                "missed": [{"where": "%x", "reason": "its input is not an add"}],
                "nodes": 7,
            }
        ]
    }


def test_ctrl_c_while_moving_into_place_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_llama(tmp_path / "out")
    before = listing(tmp_path)
    rename: Callable[..., Path] = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_llama(tmp_path / "out", force=True)
    assert listing(tmp_path) == before


def test_a_second_ctrl_c_does_not_stop_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove: Callable[..., None] = shutil.rmtree

    def interrupted(path: Path, **options: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        remove(path, **options)

    def interrupt() -> None:
        with ArtifactWriter(tmp_path / "out") as writer:
            writer.begin()
            writer.write_text("program.py", "x = 1\n")
            monkeypatch.setattr(shutil, "rmtree", interrupted)
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert listing(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_killed_compiles_left_is_swept_and_what_runs_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [f".out.partial-{os.getppid()}", ".out.partial-mine", f".other.partial-{ended.pid}"]
    for name in [*kept, f".out.partial-{ended.pid}"]:
        (tmp_path / name).mkdir()
    compile_llama(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "out"])
