"""The content id: what it covers, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.ir.manifest import FileEntry, KVSlot, Manifest, ManifestError

MANIFEST = Manifest(
    architecture="LlamaForCausalLM",
    model_type="llama",
    target="cpu",
    dtype="float32",
    vocab_size=99,
    max_position=64,
    kv_slots=(KVSlot(2, 8, 8),),
    files={
        "program.py": FileEntry(3, "aa", "program"),
        "tests/golden.json": FileEntry(4, "bb", "test"),
    },
)


def with_file(path: str, entry: FileEntry) -> Manifest:
    return replace(MANIFEST, files={**MANIFEST.files, path: entry})


@pytest.mark.parametrize(
    "change",
    [
        {"target": "cuda:sm_90"},
        {"dtype": "bfloat16"},
        {"quantization": "int4"},
        {"vocab_size": 98},
        {"max_position": 65},
        {"kv_slots": (KVSlot(2, 8, 8, window=4),)},
        {"required_features": ("fp3",)},
        {"format": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_id_covers_what_the_runtime_decides_by(change: dict[str, Any]) -> None:
    assert replace(MANIFEST, **change).artifact_id != MANIFEST.artifact_id


@pytest.mark.parametrize(
    "path", ["program.py", "kernels/src/new.py", "kernels/binary.py", "plans.py", "testsuite.py"]
)
@pytest.mark.parametrize("role", ["program", "test"])
def test_the_id_covers_every_file_that_may_be_run(path: str, role: str) -> None:
    """Whatever role a manifest claims for it."""
    assert with_file(path, FileEntry(3, "cc", role)).artifact_id != MANIFEST.artifact_id


def test_the_id_leaves_out_where_it_was_made() -> None:
    elsewhere = replace(MANIFEST, source="other", revision="main", producer={"octavo": "9"})
    assert elsewhere.artifact_id == MANIFEST.artifact_id


def test_the_id_leaves_out_what_hugging_face_answered() -> None:
    golden = FileEntry(5, "dd", "test")
    assert with_file("tests/golden.json", golden).artifact_id == MANIFEST.artifact_id


@pytest.mark.parametrize("path", ["plans/sm_90.json", "kernels/bin/sm_90/norm.add_norm.1.cubin"])
def test_the_id_leaves_out_what_can_be_made_again(path: str) -> None:
    assert with_file(path, FileEntry(5, "dd", "kernel")).artifact_id == MANIFEST.artifact_id


def test_the_text_of_a_manifest_reads_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_a_manifest_whose_id_is_not_its_own_is_refused() -> None:
    text = MANIFEST.to_json().replace('"aa"', '"ee"')
    with pytest.raises(ManifestError, match="content id"):
        Manifest.from_json(text)
