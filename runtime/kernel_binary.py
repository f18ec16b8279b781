"""A kernel compiled for one architecture, and what it was compiled from: the files in kernels/bin.

``<module>.<kernel>.<key>.cubin`` is what the driver loads, ``.json`` beside it a ``BinaryInfo``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton.language as tl

from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import Constant, Launch

EXACT_ARCH = 90  # from here on binaries use features of one architecture: sm_90a


@dataclass(frozen=True)
class Specialisation:
    """Everything that a binary depends on: the kernel's text and what was fixed in it.

    ``module`` is the name of the file under ``kernels/src``, ``source`` its text; ``arch`` is 90
    for sm_90.
    """

    module: str
    kernel: str
    source: str
    signature: str
    constants: dict[str, Constant]
    options: dict[str, int]
    arch: int

    @classmethod
    def of(cls, launch: Launch, arch: int) -> Specialisation:
        """What a launch needs on an architecture."""
        kernel = launch.kernel
        return cls(
            module=kernel.module.rpartition(".")[2],
            kernel=kernel.name,
            source=kernel.source(),
            signature=kernel.signature,
            constants=launch.constants_for(arch),
            options=launch.options,
            arch=arch,
        )

    @cached_property
    def stem(self) -> str:
        """Name of the two files, without their suffixes."""
        key = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
        return f"{self.module}.{self.kernel}.{key[:16]}"

    def to_dict(self) -> dict[str, Any]:
        """JSON that ``from_dict`` reads; equal for equal specialisations."""
        constants = {name: encode(value) for name, value in self.constants.items()}
        return {**dataclasses.asdict(self), "constants": constants}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Specialisation:
        """The inverse of ``to_dict``."""
        constants = {name: decode(value) for name, value in body["constants"].items()}
        return cls(**{**body, "constants": constants})

    def __str__(self) -> str:
        shown = {**self.constants, **self.options}
        constants = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.module}.{self.kernel}({constants}) for sm_{self.arch}"


@dataclass(frozen=True)
class BinaryInfo:
    """What is to be known of a cubin, its ``.json``.

    ``arch`` is the assembler's, ``sm_90a``; ``entry`` the function's name; ``num_warps`` counts all
    of a program's warps, more than were asked for where Triton added some. The last
    ``num_scratch_parameters`` parameters are pointers to Triton's global and profile scratch
    memory, ``global_scratch_bytes`` for each program. ``registers`` and ``stack_bytes`` (spills and
    local arrays, for each thread) are None where no cuobjdump was at hand. ``cubin_sha256`` is
    empty for a binary that was made before there was one.
    """

    module: str
    kernel: str
    constants: dict[str, Any]
    options: dict[str, int]
    signature: str
    arch: str
    entry: str
    num_warps: int
    shared_bytes: int
    num_parameters: int
    num_scratch_parameters: int
    global_scratch_bytes: int
    registers: int | None
    stack_bytes: int | None
    triton: str
    ptxas: str
    cubin_sha256: str = ""


@dataclass(frozen=True)
class Binary:
    """A cubin and what is to be known of it."""

    info: BinaryInfo
    cubin: bytes

    @property
    def content(self) -> dict[str, bytes]:
        """The two files by suffix."""
        text = json.dumps(dataclasses.asdict(self.info), indent=2, sort_keys=True) + "\n"
        return {".cubin": self.cubin, ".json": text.encode()}

    def write(self, folder: Path, stem: str) -> None:
        """Write the two files, each at once; the ``.json`` last, since readers look for it."""
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in self.content.items():
            _write_at_once(folder / f"{stem}{suffix}", content)

    @classmethod
    def read(cls, folder: Path, stem: str) -> Binary | None:
        """The binary, None if there is none. Raises ArtifactError for files that are damaged."""
        path = folder / f"{stem}.json"
        try:
            content, cubin = path.read_bytes(), path.with_suffix(".cubin").read_bytes()
        except FileNotFoundError:
            return None
        info = parse_info(content, path)
        if info.cubin_sha256 and info.cubin_sha256 != hashlib.sha256(cubin).hexdigest():
            raise ArtifactError(f"{path.with_suffix('.cubin')} is not the binary that {path} is of")
        return cls(info, cubin)


def parse_info(content: bytes, path: Path) -> BinaryInfo:
    """The ``.json`` of a binary. Raises ArtifactError for anything else."""
    try:
        return BinaryInfo(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: not the description of a binary: {error}") from None


def encode(constant: Constant) -> Any:
    """A constexpr as JSON. Raises ValueError for a kind of value that no kernel is given."""
    if constant is None or isinstance(constant, bool | int | float | str):
        return constant
    if isinstance(constant, tl.dtype):
        return {"dtype": constant.name}
    raise ValueError(f"a constexpr is a number, a str, None or a Triton dtype, not {constant!r}")


def decode(value: Any) -> Constant:
    """The inverse of ``encode``."""
    return tl.dtype(value["dtype"]) if isinstance(value, dict) else value


def fits(arch: int, device_arch: int) -> bool:
    """Whether binaries made for ``arch`` run on a device of ``device_arch``, 90 for sm_90."""
    if arch >= EXACT_ARCH:
        return arch == device_arch
    return arch // 10 == device_arch // 10 and arch <= device_arch


def _write_at_once(path: Path, content: bytes) -> None:
    """Readers, and writers of the same file, see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
