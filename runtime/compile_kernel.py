"""Compiles one kernel for an architecture, on any machine; as a program, one for each line.

A worker (``python -m octavo.runtime.compile_kernel``) reads specialisations as lines of JSON and
answers each with a line: the two files of the binary, or the error. It works from the text alone,
so that the process that asks may run Triton's interpreter, or hold a GPU.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from triton import __version__ as triton_version
from triton import compile as triton_compile
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import NEEDS_TRITON
from octavo.runtime.kernel_binary import Binary, BinaryInfo, Specialisation, encode
from octavo.runtime.kernel_signature import parse_signature

OLDEST_TRITON = (3, 6)
_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_USAGE = re.compile(r"\bREG:(\d+)\s+STACK:(\d+).*?\bLOCAL:(\d+)")
_NUMBERS = itertools.count()


def compile_kernel(wanted: Specialisation) -> Binary:
    """Compile a kernel for its architecture with this process's Triton.

    Nothing of Triton's own caches is used or left behind, and no path enters the binary. Raises
    ArtifactError, naming the kernel, its constants and the architecture.
    """
    check_triton()
    with tempfile.TemporaryDirectory(prefix="octavo_kernel_") as folder, _knobs(folder):
        try:
            module = _import(wanted, Path(folder))
            compiled = triton_compile(
                _source(wanted, getattr(module, wanted.kernel)),
                target=GPUTarget("cuda", wanted.arch, 32),
                options=dict(wanted.options),
            )
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise ArtifactError(f"{wanted} does not compile: {reason}") from error
        return _binary(wanted, compiled, Path(folder))


def check_triton() -> None:
    """Raise ArtifactError for a Triton that is too old or runs its interpreter."""
    found = tuple(int(part) for part in re.findall(r"\d+", triton_version)[:2])
    if found < OLDEST_TRITON:
        raise ArtifactError(f"{NEEDS_TRITON}; installed is {triton_version}")
    if knobs.runtime.interpret:
        raise ArtifactError("kernels cannot be compiled with TRITON_INTERPRET=1; unset it")


@contextmanager
def _knobs(folder: str) -> Iterator[None]:
    with knobs.compilation.scope(), knobs.cache.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # it holds paths
        yield


def _import(wanted: Specialisation, folder: Path) -> ModuleType:
    """The module, from a file: that is where Triton reads a function's text."""
    path = folder / f"{wanted.module}.py"
    path.write_text(wanted.source, encoding="utf-8")
    name = f"octavo_kernel_{next(_NUMBERS)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def _source(wanted: Specialisation, function: Any) -> ASTSource:
    parameters = {parameter.name: parameter for parameter in parse_signature(wanted.signature)}
    names = list(function.arg_names)
    signature = {n: parameters[n].triton_type if n in parameters else "constexpr" for n in names}
    constants = {(names.index(name),): value for name, value in wanted.constants.items()}
    divisors = {
        (index,): [["tt.divisibility", parameters[name].alignment]]
        for index, name in enumerate(names)
        if name in parameters and parameters[name].alignment > 1
    }
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constants, divisors)


def _binary(wanted: Specialisation, compiled: Any, folder: Path) -> Binary:
    metadata, cubin, ptx = compiled.metadata, compiled.asm["cubin"], compiled.asm["ptx"]
    entry = _ENTRY.search(ptx)
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert entry is not None, f"{wanted}: no entry in the PTX"
    assert target is not None, f"{wanted}: no target in the PTX"
    num_parameters = entry[1].count(".param")
    registers, stack_bytes = _usage(cubin, folder)
    info = BinaryInfo(
        module=wanted.module,
        kernel=wanted.kernel,
        constants={name: encode(value) for name, value in wanted.constants.items()},
        options=wanted.options,
        signature=wanted.signature,
        arch=target[1],
        entry=metadata.name,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        num_parameters=num_parameters,
        num_scratch_parameters=num_parameters - len(parse_signature(wanted.signature)),
        global_scratch_bytes=getattr(metadata, "global_scratch_size", 0) or 0,
        registers=registers,
        stack_bytes=stack_bytes,
        triton=toolchain(wanted.arch)[0],
        ptxas=toolchain(wanted.arch)[1],
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
    )
    return Binary(info, cubin)


def _usage(cubin: bytes, folder: Path) -> tuple[int | None, int | None]:
    """Registers, and bytes of stack and local memory, of each thread."""
    path = folder / "usage.cubin"
    path.write_bytes(cubin)
    try:
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, RuntimeError, AttributeError, subprocess.CalledProcessError):
        return None, None
    match = _USAGE.search(printed)
    return (int(match[1]), int(match[2]) + int(match[3])) if match else (None, None)


def toolchain(arch: int) -> tuple[str, str]:
    """Versions of this process's Triton and of its assembler for an architecture, 90 for sm_90."""
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    return triton_version, str(tool.version)


def is_usual_compiler() -> bool:
    """Whether equal specialisations give equal binaries: no variable of Triton's that changes how
    it compiles is set, as one may be for debugging."""
    return not get_cache_invalidating_env_vars()


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer each line of JSON with one, until there are no more."""
    for line in requests:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        binary = compile_kernel(Specialisation.from_dict(request))
    except ArtifactError as error:
        return {"error": str(error)}
    return {name: base64.b64encode(data).decode() for name, data in binary.content.items()}


if __name__ == "__main__":
    # What kernels or Triton print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
