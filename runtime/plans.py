"""Plans: which of its candidates each kernel module uses, for a GPU or an architecture.

``plans/nvidia_h200.json`` was measured on that GPU, ``plans/sm_90.json`` is a guess for any of its
architecture. Both hold ``{"<module>": {"<row bucket>": {<candidate>}}}``, where a bucket is named
by its largest number of rows, ``64``, or ``*`` for the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.runtime.artifact import read_json_object
from octavo.runtime.artifact_files import RECOMPILE
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import Choices

Plan = dict[str, dict[str, dict[str, Any]]]


def gpu_plan_name(gpu_name: str) -> str:
    """The file for a GPU: ``nvidia_h200.json`` for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", gpu_name.lower()).strip("_") + ".json"


def find_plan(root: Path, gpu_name: str, arch: int) -> Path | None:
    """The plan of an artifact for a GPU: its own, else its architecture's, else None."""
    for name in (gpu_plan_name(gpu_name), f"sm_{arch}.json"):
        path = root / "plans" / name
        if path.is_file():
            return path
    return None


def bind_plan(path: Path | None, modules: Iterable[ModuleType], arch: int | None = None) -> None:
    """Make the choices of modules those of a plan; others are the defaults of the architecture.

    Raises ArtifactError, naming the file, for a module, a bucket or a choice that is not there.
    """
    choices = {each.__name__.rpartition(".")[2]: each.CHOICES for each in modules if _has(each)}
    for each in choices.values():
        each.reset(arch)
    if path is None:
        return
    for module, buckets in read_json_object(path).items():
        if module not in choices or not isinstance(buckets, dict):
            raise ArtifactError(f"{path}: there is no kernel module {module!r}; {RECOMPILE}")
        for bucket, choice in buckets.items():
            try:
                choices[module].choose(bucket, choice)
            except (ValueError, TypeError) as error:
                raise ArtifactError(f"{path}: {module}: {error}; {RECOMPILE}") from None


def current_plan(modules: Iterable[ModuleType]) -> Plan:
    """What is chosen now, as a plan file holds it."""
    return {
        each.__name__.rpartition(".")[2]: {b.name: b.chosen for b in each.CHOICES.buckets}
        for each in modules
        if _has(each)
    }


def _has(module: ModuleType) -> bool:
    return isinstance(getattr(module, "CHOICES", None), Choices)
