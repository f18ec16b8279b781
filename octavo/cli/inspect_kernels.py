"""``octavo inspect DIR --kernels``: each kernel, how it is run, and what its binaries take."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.binaries import FOLDER
from octavo.runtime.kernel import Bucket, Choices
from octavo.runtime.kernel_binary import BinaryInfo, parse_info
from octavo.runtime.plans import bind_plan
from octavo.runtime.program_loader import import_program
from octavo.runtime.record_program import kernel_modules

MANY_ROWS = 8192  # what the last row bucket's cost is given for


@dataclass(frozen=True)
class Way:
    """How a module runs up to ``rows`` rows, and what that moves and computes."""

    module: str
    op: str
    rows: str
    choice: str
    num_bytes: str
    flops: str


@dataclass(frozen=True)
class Compiled:
    """One binary: sizes are for each thread, shared memory for each program."""

    module: str
    kernel: str
    arch: str
    constants: str
    registers: str
    spilled: str
    shared: str


def read_ways(directory: Path, plan: str | None) -> list[Way]:
    """The row buckets of every module, as ``plan`` chooses (a file of ``plans/``, without .json).

    Raises OctavoError for an artifact of another target than cuda and for an unknown plan.
    """
    opened = Artifact.open(directory, verify=False)
    if not opened.manifest.target.startswith("cuda"):
        raise OctavoError(
            f"{directory}: --kernels shows Triton kernels, and this artifact is for "
            f"{opened.manifest.target}; leave --kernels out"
        )
    program = import_program(directory, opened.manifest)
    modules = list(kernel_modules(program))
    arch = int(opened.manifest.target.rpartition("_")[2])
    bind_plan(_plan_path(directory, plan), modules, arch)
    return [way for module in modules for way in _ways(module)]


def plan_names(directory: Path) -> list[str]:
    """The plans of an artifact; the memory plan chooses no kernels."""
    paths = sorted((directory / "plans").glob("*.json"))
    return [path.stem for path in paths if path.stem != "memory"]


def read_compiled(directory: Path) -> list[Compiled]:
    """The binaries in ``kernels/bin``, by module, kernel and architecture."""
    paths = sorted((directory / FOLDER).glob("*/*.json"))
    infos = [parse_info(path.read_bytes(), path) for path in paths]
    shared = _shared_constants(infos)
    return [_compiled(info, shared[info.module, info.kernel]) for info in infos]


def _plan_path(directory: Path, plan: str | None) -> Path | None:
    if plan is None:
        return None
    if plan not in plan_names(directory):
        known = ", ".join(plan_names(directory)) or "none"
        raise OctavoError(f"{directory}: no plan {plan!r}; there are: {known}")
    return directory / "plans" / f"{plan}.json"


def _ways(module: ModuleType) -> Iterator[Way]:
    name = module.__name__.rpartition(".")[2]
    op = str(getattr(module, "OP", ""))
    choices = getattr(module, "CHOICES", None)
    if not isinstance(choices, Choices):
        yield Way(name, op, "any", "", *_cost(module, 1))
        return
    for bucket in choices.buckets:
        rows = bucket.max_rows or MANY_ROWS
        yield Way(name, op, _rows(bucket), _text(bucket.chosen), *_cost(module, rows))


def _rows(bucket: Bucket) -> str:
    return "more" if bucket.max_rows is None else f"to {bucket.max_rows}"


def _cost(module: ModuleType, rows: int) -> tuple[str, str]:
    if not hasattr(module, "cost"):
        return "", ""
    cost = module.cost(rows)
    return f"{cost.bytes:,}", f"{cost.flops:,}"


def _shared_constants(infos: list[BinaryInfo]) -> dict[tuple[str, str], dict[str, Any]]:
    """What is the same in all binaries of a kernel, by module and kernel: it need not be shown."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for info in infos:
        groups[info.module, info.kernel].append({**info.constants, **info.options})
    return {
        key: {k: v for k, v in each[0].items() if all(other.get(k) == v for other in each)}
        for key, each in groups.items()
    }


def _compiled(info: BinaryInfo, shared: dict[str, Any]) -> Compiled:
    differing = {
        name: value
        for name, value in {**info.constants, **info.options}.items()
        if name not in shared
    }
    return Compiled(
        module=info.module,
        kernel=info.kernel,
        arch=info.arch,
        constants=_text(differing),
        registers=_number(info.registers),
        spilled=_number(info.stack_bytes),
        shared=f"{info.shared_bytes:,}",
    )


def _text(constants: dict[str, Any]) -> str:
    return " ".join(f"{name}={_constant(value)}" for name, value in constants.items())


def _constant(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
