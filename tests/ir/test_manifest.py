"""The content id: what it covers, and what it leaves out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from octavo.ir.manifest import OUTSIDE_ID, FileEntry, KVSlot, Manifest, ManifestError, num_groups

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


def test_a_slot_says_its_chunk_and_group_only_where_it_has_some() -> None:
    """Manifests from before there were any have the ids that they had."""
    slots = (KVSlot(2, 8, 8), KVSlot(2, 8, 8, chunk=4, group=1))
    text = replace(MANIFEST, kv_slots=slots).to_json()
    plain = {"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "window": None}
    assert json.loads(text)["kv_slots"] == [plain, {**plain, "chunk": 4, "group": 1}]
    assert Manifest.from_json(text).kv_slots == slots
    assert num_groups(slots) == 2


def with_file(path: str, entry: FileEntry) -> Manifest:
    return replace(MANIFEST, files={**MANIFEST.files, path: entry})


@pytest.mark.parametrize(
    "change",
    [
        {"target": "cuda:sm_90"},
        {"dtype": "bfloat16"},
        {"quantization": "int4"},
        {"kv_scheme": "i8 token"},
        {"num_key_offsets": 2},
        {"vocab_size": 98},
        {"max_position": 65},
        {"kv_slots": (KVSlot(2, 8, 8, window=4),)},
        {"kv_slots": (KVSlot(2, 8, 8, chunk=4),)},
        {"kv_slots": (KVSlot(2, 8, 8, group=1),)},
        {"required_features": ("fp3",)},
        {"format": 1},
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


def written_by_hand(format: Any, *outside: str) -> str:
    """A manifest's text with a plan and a binary; its id leaves out the files named ``outside``."""
    hashes = {
        "kernels/bin/sm_90/norm.add_norm.1.cubin": "cc",
        "plans/sm_90.json": "dd",
        "program.py": "aa",
        "tests/golden.json": "bb",
    }
    slot = {"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "window": None}
    covered = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "target": "cuda:sm_90",
        "dtype": "float32",
        "vocab_size": 99,
        "max_position": 64,
        "kv_slots": [slot],
        "quantization": None,
        "required_features": [],
        "format": format,
        "files": {name: value for name, value in hashes.items() if name not in outside},
    }
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    files = {name: {"size": 3, "sha256": value, "role": "file"} for name, value in hashes.items()}
    body = {
        **covered,
        "files": files,
        "source": "here",
        "revision": None,
        "producer": {},
        "artifact_id": "sha256:" + hashlib.sha256(text.encode()).hexdigest(),
    }
    return json.dumps(body)


RULES = {
    1: ("tests/golden.json",),
    2: ("tests/golden.json", "plans/sm_90.json", "kernels/bin/sm_90/norm.add_norm.1.cubin"),
}


@pytest.mark.parametrize("format", RULES)
def test_a_format_is_read_by_its_own_rule(format: int) -> None:
    manifest = Manifest.from_json(written_by_hand(format, *RULES[format]))
    assert manifest.format == format
    assert [name for name in manifest.files if not manifest.id_covers(name)] == sorted(
        RULES[format]
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("format", RULES)
def test_a_format_read_by_another_rule_is_refused(format: int) -> None:
    text = written_by_hand(format, *RULES[3 - format])
    with pytest.raises(ManifestError, match=rf"by the rule of format {format}, is .*compile the"):
        Manifest.from_json(text)


@pytest.mark.parametrize("format", RULES)
@pytest.mark.parametrize("change", [('"aa"', '"ee"'), ("99", "98"), ("cuda:sm_90", "cpu")])
def test_a_manifest_that_was_tampered_with_is_refused(format: int, change: tuple[str, str]) -> None:
    text = written_by_hand(format, *RULES[format]).replace(*change)
    with pytest.raises(ManifestError, match="content id"):
        Manifest.from_json(text)


def test_a_changed_plan_or_binary_changes_the_id_of_format_1_alone() -> None:
    for change in (('"cc"', '"ee"'), ('"dd"', '"ee"')):
        assert Manifest.from_json(written_by_hand(2, *RULES[2]).replace(*change)).format == 2
        with pytest.raises(ManifestError, match="content id"):
            Manifest.from_json(written_by_hand(1, *RULES[1]).replace(*change))


def test_a_format_cannot_be_relabelled() -> None:
    """Else an id that covers the binaries could be made one that does not."""
    text = written_by_hand(1, *RULES[1]).replace('"format": 1', '"format": 2')
    with pytest.raises(ManifestError, match="content id"):
        Manifest.from_json(text)


@pytest.mark.parametrize("format", [3, 0, -1, None, "2", 2.0, True, [], {}])
def test_another_format_is_refused_by_name(format: Any) -> None:
    text = written_by_hand(format, *RULES[2])
    with pytest.raises(
        ManifestError, match=r"^format .* is not one of \[1, 2\].*upgrade"
    ) as caught:
        Manifest.from_json(text)
    assert repr(format) in str(caught.value)


def test_new_manifests_are_of_the_newest_format() -> None:
    assert MANIFEST.format == max(OUTSIDE_ID) == 2


def test_the_text_of_a_manifest_reads_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_a_manifest_whose_id_is_not_its_own_is_refused() -> None:
    text = MANIFEST.to_json().replace('"aa"', '"ee"')
    with pytest.raises(ManifestError, match="content id"):
        Manifest.from_json(text)


def test_a_manifest_without_a_kv_scheme_is_as_it_was_before_there_were_any() -> None:
    assert "kv_scheme" not in json.loads(MANIFEST.to_json())
    with_scheme = replace(MANIFEST, kv_scheme="f8e4m3 head", num_key_offsets=30)
    assert Manifest.from_json(with_scheme.to_json()) == with_scheme
    body = dataclasses.asdict(MANIFEST)
    for younger in ("kv_scheme", "num_key_offsets", "quant_schemes"):
        del body[younger]
    for outside in ("producer", "source", "revision"):
        del body[outside]
    body["kv_slots"] = [
        {name: value for name, value in slot.items() if name not in ("chunk", "group")}
        for slot in body["kv_slots"]
    ]
    body["files"] = {"program.py": "aa"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert MANIFEST.artifact_id == "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
