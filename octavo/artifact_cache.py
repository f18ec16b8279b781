"""Artifacts compiled on the way: a model given where an artifact belongs is compiled once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from octavo.codegen.target import resolve_target
from octavo.compile import compile_model
from octavo.frontend.hub import fetch_snapshot, is_model_id
from octavo.runtime.cache_directory import cache_directory

_ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("codegen", "frontend", "ir", "octavo", "passes", "templates")


def compiled(
    model: str | Path,
    *,
    dtype: str = "auto",
    quant: str | None = None,
    revision: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Path:
    """The artifact of a model, compiled now unless the cache has it.

    The key is what was read: names, sizes and times of the model's files, the options, the versions
    of torch and transformers, and the compiler's own source. Raises what ``compile_model`` raises.
    """
    path = Path(model).expanduser()
    if not path.exists() and is_model_id(str(model)):
        path = fetch_snapshot(str(model), revision, with_weights=True)
    options = {
        "dtype": dtype,
        "quant": quant and [quant, _recipe_text(quant)],
        "kv_cache_dtype": kv_cache_dtype,
    }
    key = _key(path, options)
    artifact = cache_directory() / "artifacts" / f"{path.stem}-{key[:16]}"
    artifact.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{artifact}.lock"):
        if not (artifact / "manifest.json").is_file():
            compile_model(path, artifact, dtype=dtype, quant=quant, kv_cache_dtype=kv_cache_dtype)
    return artifact


def _key(path: Path, options: dict[str, Any]) -> str:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    read = {
        "model": [str(path.resolve()), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]],
        "options": {**options, "target": resolve_target("auto").name},
        "versions": versions,
        "compiler": _compiler_hash(),
    }
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def _recipe_text(quant: str) -> str | None:
    path = Path(quant)
    return path.read_text("utf-8") if path.is_file() else None


def _compiler_hash() -> str:
    """Over the compiler's own files: a changed compiler compiles again."""
    digest = hashlib.sha256()
    for file in _sources():
        digest.update(str(file.name).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    # In a wheel the parts lie below this folder, in a checkout beside it.
    for part in _PARTS:
        folder = next(f for f in (_ROOT / "octavo" / part, _ROOT / part) if f.is_dir())
        yield from sorted(f for f in folder.rglob("*") if f.suffix in (".py", ".j2"))
