"""A plan as files of an artifact, with the binaries that it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from octavo.ir.manifest import FileEntry
from octavo.runtime.artifact import Artifact
from octavo.runtime.binaries import FOLDER as BINARIES
from octavo.runtime.binaries import BoundKernels
from octavo.runtime.plans import Plan
from octavo.runtime.record_program import record_module
from octavo.runtime.whole_file import write_whole


def ship_binaries(
    artifact: Artifact, program: ModuleType, bound: BoundKernels
) -> dict[str, FileEntry]:
    """Put what the chosen candidates need into the artifact: it then loads without compiling."""
    entries = {}
    launches = record_module(program, artifact.root, artifact.manifest)
    for wanted, binary in bound.unshipped(launches):
        folder = Path(BINARIES) / f"sm_{wanted.arch}"
        binary.write(artifact.root / folder, wanted.stem)
        for suffix in (".cubin", ".json"):
            name = f"{folder.as_posix()}/{wanted.stem}{suffix}"
            entries[name] = _entry((artifact.root / name).read_bytes(), "kernel")
    return entries


def _entry(content: bytes, role: str) -> FileEntry:
    return FileEntry(len(content), hashlib.sha256(content).hexdigest(), role)


def write_plan(
    artifact: Artifact, path: Path, plan: Plan, binaries: Mapping[str, FileEntry] | None = None
) -> None:
    """Write a plan and list it in the manifest, with the binaries that it needs.

    The content id, which covers neither, stays what it was.
    """
    content = (json.dumps(plan, indent=1) + "\n").encode()
    name = path.as_posix()
    write_whole(artifact.root / path, content)
    added = {**(binaries or {}), name: _entry(content, "plan")}
    files = dict(sorted({**artifact.manifest.files, **added}.items()))
    manifest = replace(artifact.manifest, files=files)
    assert manifest.artifact_id == artifact.manifest.artifact_id, f"{name} is in the content id"
    write_whole(artifact.root / "manifest.json", manifest.to_json().encode())
