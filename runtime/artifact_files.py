"""Checks that the files of an artifact are those of its manifest, and inside it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from octavo.ir.manifest import FileEntry, Manifest
from octavo.runtime.errors import ArtifactError

CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".pth")
RECOMPILE = "copy the artifact again or compile the model again"


def check_files(root: Path, manifest: Manifest, *, hash_weights: bool = True) -> None:
    """Raise ArtifactError unless every listed file is there, inside ``root``, with its content.

    The cheap checks of all files come first, then the hashes of all but weights, then weights.
    """
    for name, entry in manifest.files.items():
        _check_name(name, entry)
        _check_place(root, name, entry)
    for name in _unlisted_code(root, manifest):
        raise ArtifactError(
            f"{root}: {name} is code that the manifest does not list; delete it or {RECOMPILE}"
        )
    weights = [name for name in manifest.files if is_weight(name)]
    others = [name for name in manifest.files if not is_weight(name)]
    _check_hashes(root, manifest, others)
    if hash_weights:
        _check_hashes(root, manifest, weights)


def is_weight(name: str) -> bool:
    """Whether a file of the artifact holds tensors."""
    return name.endswith(".safetensors")


def _check_name(name: str, entry: FileEntry) -> None:
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and "/".join(parts) == name and "\\" not in name and ":" not in name
    if not is_plain or name.startswith("/") or ".." in parts or "\0" in name:
        raise ArtifactError(
            f"manifest.json lists {name!r}, which is not a plain path inside the artifact; "
            "do not load this artifact, compile the model again"
        )
    if type(entry.size) is not int or not isinstance(entry.sha256, str):
        raise ArtifactError(f"manifest.json: size or sha256 of {name} is of a wrong kind")


def _check_place(root: Path, name: str, entry: FileEntry) -> None:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ArtifactError(
            f"{root}: {name} is a link that leads out of the artifact; "
            "copy the file itself (cp -L) in its place"
        )
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ArtifactError(f"{root}: {name} is missing; {RECOMPILE}") from None
    except OSError as error:
        raise ArtifactError(f"{root}: {name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{root}: {name} is not a regular file; {RECOMPILE}")
    if status.st_size != entry.size:
        raise ArtifactError(
            f"{root}: {name} has {status.st_size} bytes, the manifest says {entry.size}; "
            f"{RECOMPILE}"
        )


def _unlisted_code(root: Path, manifest: Manifest) -> Iterator[str]:
    """Code in a place where a reader would take it for the artifact's own.

    Only listed files are ever imported; a byte-code cache that Python left behind is harmless.
    """
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        for file in files:
            name = Path(folder, file).relative_to(root).as_posix()
            is_code = name.startswith("kernels/") or name.endswith(CODE_SUFFIXES)
            if is_code and name not in manifest.files:
                yield name


def _check_hashes(root: Path, manifest: Manifest, names: Iterable[str]) -> None:
    ordered = list(names)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(sha256_of, [root / name for name in ordered])
        for name, digest in zip(ordered, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise ArtifactError(
                    f"{root}: the content of {name} is not what the manifest says "
                    f"(SHA-256 {digest[:12]}..., expected "
                    f"{manifest.files[name].sha256[:12]}...); {RECOMPILE}"
                )


def sha256_of(path: Path) -> str:
    """Lower-case hex SHA-256 of a file, read in pieces."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
