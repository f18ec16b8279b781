"""Equal input gives an equal artifact: in any directory, process and number of threads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, octavo
from model_zoo import TINY

from octavo.compile import compile_model
from octavo.runtime.artifact import Artifact


def contents(artifact: Path) -> dict[str, str]:
    """The hash of each file but the records of Hugging Face, and under "" the content id."""
    manifest = Artifact.open(artifact).manifest
    files = {path: entry.sha256 for path, entry in manifest.files.items()}
    # Computed in floating point, whose last bits depend on the number of threads.
    del files["tests/golden.json"]
    return {"": manifest.artifact_id, **files}


def compile_here(folder: Path, model: Path, **options: Any) -> dict[str, str]:
    compile_model(model, folder, target="cpu", progress=False, **options)
    return contents(folder)


def compile_elsewhere(folder: Path, model: Path, *options: str) -> dict[str, str]:
    """Compile from another directory, in a process that is unlike this one."""
    here = torch.get_num_threads()
    unlike = {
        "PYTHONHASHSEED": "12345",
        "OMP_NUM_THREADS": "2" if here == 1 else "1",
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
    }
    folder.parent.mkdir(parents=True)
    done = octavo(
        *("compile", model, "-o", folder.name, "--target", "cpu", *options),
        env={**os.environ, "PYTHONPATH": str(ROOT), **unlike},
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    return contents(folder)


@pytest.mark.slow
def test_a_real_model(smollm2: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    """Large enough for the number of threads to change the last bits of a sum."""
    assert contents(smollm2) == compile_elsewhere(tmp_path / "there" / "smollm2", smollm2_gguf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint(tiny_checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere" / "another-name")
    here = compile_here(tmp_path / "a", tiny_checkpoint, dtype=dtype)
    assert here == compile_elsewhere(tmp_path / "deep" / "er" / "b", copy, "--dtype", dtype)


def test_random_weights(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(TINY["gemma2"]().to_json_string())
    here = compile_here(tmp_path / "a", config, random_weights=5)
    assert here == compile_elsewhere(tmp_path / "deep" / "b", config, "--random-weights", "5")
    other = compile_here(tmp_path / "c", config, random_weights=6)
    assert other[""] != here[""]
    assert other["program.py"] == here["program.py"]
