"""Kernel templates as modules: rendered, written to a file of their own and imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from octavo.codegen.render import render_kernel


def rendered(op: str, constants: dict[str, Any], template: str | None = None) -> ModuleType:
    """The module of ``templates/triton/<op>.py.j2``, or of another template's name."""
    path = f"triton/{template or op}.py.j2"
    return imported(op, render_kernel(path, op, constants))


def imported(name: str, source: str) -> ModuleType:
    """A new module of this source. Triton reads a kernel's text from its file, so there is one.

    Its name depends on the source alone, so that test processes find each other's binaries.
    """
    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    path = Path(_folder()) / f"{unique}.py"
    if not path.exists():
        path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    if hasattr(module, "CHOICES"):
        module.CHOICES.reset(arch_here())
    return module


@cache
def arch_here() -> int | None:
    """The architecture on which kernels of tests run, 90 for sm_90; None in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@cache
def _folder() -> str:
    """Removed when the process ends."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="rendered_"))
    return _FOLDERS[0].name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
