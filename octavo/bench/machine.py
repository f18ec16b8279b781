"""Where a benchmark ran, for whoever reads its figures later."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import timeit
from pathlib import Path

import torch

import octavo
from octavo.bench.results import Machine, Model
from octavo.runtime.artifact import Artifact
from octavo.runtime.artifact_files import is_weight

_PACKAGES = ("torch", "triton", "transformers")


def describe_machine() -> Machine:
    """This machine, now."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        versions=_versions(has_gpu),
        python_rate=_python_rate(),
    )


def describe_model(artifact: Artifact, load_format: str) -> Model:
    """The artifact that runs."""
    manifest = artifact.manifest
    return Model(
        name=Path(manifest.source).name or artifact.root.name,
        architecture=manifest.architecture,
        target=manifest.target,
        dtype=str(artifact.dtype).removeprefix("torch."),
        quantization=manifest.quantization,
        artifact_id=manifest.artifact_id,
        weight_bytes=sum(e.size for name, e in manifest.files.items() if is_weight(name)),
        load_format=load_format,
    )


def _python_rate(num_turns: int = 1_000_000) -> float:
    """Turns of a loop a second: the best of five, since whatever else runs only slows it."""
    return num_turns / min(timeit.repeat("pass", number=num_turns, repeat=5))


def _versions(has_gpu: bool) -> dict[str, str]:
    found = {"octavo": octavo.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if has_gpu and torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
