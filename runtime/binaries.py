"""Finds each kernel's binary for the GPU at hand: in the artifact, in a cache, by compiling."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from octavo.ir.manifest import FileEntry
from octavo.runtime.artifact import Artifact
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import compile_here_or_there, specialisations
from octavo.runtime.cuda_driver import (
    CudaDriver,
    CudaError,
    Launcher,
    RefusedBinary,
    make_context_current,
)
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import PDL_ARCH, Kernel, Launch
from octavo.runtime.kernel_binary import Binary, Specialisation, fits, parse_info
from octavo.runtime.plans import bind_plan, find_plan
from octavo.runtime.record_program import kernel_modules, record_module

logger = logging.getLogger(__name__)

OLDEST_ARCH = 80
FOLDER = "kernels/bin"


@dataclass(frozen=True)
class ShippedBinaries:
    """The binaries of an artifact, each checked against the manifest's hash when it is read."""

    root: Path
    files: dict[str, FileEntry]

    def archs_for(self, device_arch: int) -> list[int]:
        """Architectures with binaries that a device can run, its own or the nearest first."""
        folders = {name.split("/")[2] for name in self.files if name.startswith(f"{FOLDER}/")}
        archs = (int(folder.removeprefix("sm_")) for folder in folders)
        return sorted((arch for arch in archs if fits(arch, device_arch)), reverse=True)

    def find(self, wanted: Specialisation) -> Binary | None:
        """The binary if the manifest lists it. Raises ArtifactError if it was changed since."""
        stem = f"{FOLDER}/sm_{wanted.arch}/{wanted.stem}"
        if f"{stem}.json" not in self.files or f"{stem}.cubin" not in self.files:
            return None
        return self.read(wanted.arch, wanted.stem)

    def stems(self, arch: int) -> list[str]:
        """The names of all binaries for an architecture."""
        folder = f"{FOLDER}/sm_{arch}/"
        names = (name.removeprefix(folder) for name in self.files if name.startswith(folder))
        return sorted(name.removesuffix(".cubin") for name in names if name.endswith(".cubin"))

    def read(self, arch: int, stem: str) -> Binary:
        """A binary by its name. Raises ArtifactError if it is not whole or was changed since."""
        path = f"{FOLDER}/sm_{arch}/{stem}"
        if f"{path}.json" not in self.files:
            raise ArtifactError(f"{self.root}: the manifest lists {path}.cubin without its .json")
        info = parse_info(self._read(f"{path}.json"), self.root / f"{path}.json")
        return Binary(info, self._read(f"{path}.cubin"))

    def _read(self, name: str) -> bytes:
        content = (self.root / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.files[name].sha256:
            raise ArtifactError(f"{self.root}: {name} has changed since it was checked")
        return content


class BoundKernels:
    """The kernels of a program, ready to be launched on one device.

    ``num_compiled`` counts the binaries that had to be made here. ``shipped`` is None where none
    may be used; ``why`` says so in the notice.
    """

    def __init__(
        self,
        device_index: int,
        arch: int,
        driver: CudaDriver,
        *,
        shipped: ShippedBinaries | None = None,
        why: str = "none were compiled before",
    ) -> None:
        self.num_compiled = 0
        self.arch = arch
        self._device_index = device_index
        self._driver = driver
        self._shipped = shipped
        self._archs = shipped.archs_for(arch) if shipped else []
        self._why = why
        self._launchers: dict[str, Launcher] = {}
        self._refused: set[str] = set()  # stems of the artifact's that do not load here
        self._cache = BinaryCache()

    def load_shipped(self) -> bool:
        """Load the artifact's binaries for this very architecture; False unless all were loaded."""
        shipped = self._shipped
        if shipped is None or self.arch not in self._archs:
            return False
        for stem in shipped.stems(self.arch):
            binary = shipped.read(self.arch, stem)
            uses_pdl = bool(binary.info.constants.get("PDL")) and self.arch >= PDL_ARCH
            try:
                self._launchers[stem] = self._launcher(binary, uses_pdl)
            except RefusedBinary as error:
                self._refuse(stem, error)
        return not self._refused

    def _refuse(self, stem: str, error: RefusedBinary) -> None:
        self._refused.add(stem)
        self._why = f"the driver refused what there was ({error})"

    def load(self, kernel: Kernel, device_index: int, launch: Launch) -> Launcher:
        """The launcher of a kernel with these constants: a kernel's ``loader``."""
        assert device_index == self._device_index, f"bound to another device than {device_index}"
        wanted = Specialisation.of(launch, self.arch)
        if wanted.stem not in self._launchers:
            self.prepare([launch])
        return self._launchers[wanted.stem]

    def prepare(self, launches: Iterable[Launch]) -> None:
        """Load what launches need; what is not found is compiled and kept in the cache.

        Raises ArtifactError or CudaError for the first that does not compile or load, after all
        the others: a tuner goes on with those.
        """
        uses_pdl = {}
        missing = {}
        for launch in launches:
            wanted = Specialisation.of(launch, self.arch)
            uses_pdl[wanted.stem] = bool(wanted.constants.get("PDL")) and self.arch >= PDL_ARCH
            if wanted.stem not in self._launchers and not self._load_found(wanted, uses_pdl):
                missing[wanted.stem] = wanted
        if missing:
            self._compile(list(missing.values()), uses_pdl)

    def unshipped(self, launches: Iterable[Launch]) -> Iterator[tuple[Specialisation, Binary]]:
        """The binaries of these launches that the artifact has not, but the cache has."""
        for wanted in specialisations(launches, self.arch):
            shipped = self._shipped
            archs = self._archs if shipped is not None else ()
            if shipped is not None and any(shipped.find(replace(wanted, arch=a)) for a in archs):
                continue
            binary = self._cache.find(wanted)
            if binary is not None:
                yield wanted, binary

    def _load_found(self, wanted: Specialisation, uses_pdl: dict[str, bool]) -> bool:
        for binary in self._found(wanted):
            try:
                self._launchers[wanted.stem] = self._launcher(binary, uses_pdl[wanted.stem])
            except RefusedBinary as error:
                self._refuse(wanted.stem, error)
                continue
            return True
        return False

    def _found(self, wanted: Specialisation) -> Iterator[Binary]:
        """Binaries to try: the artifact's, then the cache's."""
        if self._shipped is not None and wanted.stem not in self._refused:
            for arch in self._archs:
                binary = self._shipped.find(replace(wanted, arch=arch))
                if binary is not None:
                    yield binary
        cached = self._cache.find(wanted)
        if cached is not None:
            yield cached

    def _compile(self, missing: list[Specialisation], uses_pdl: dict[str, bool]) -> None:
        logger.warning(
            "compiling %d kernel%s for sm_%d, since %s; kept in %s",
            len(missing),
            "" if len(missing) == 1 else "s",
            self.arch,
            self._why,
            self._cache.folder(self.arch),
        )
        problem: CudaError | None = None
        for wanted, binary in compile_here_or_there(missing):
            self.num_compiled += 1
            self._cache.keep(wanted, binary)
            try:
                self._launchers[wanted.stem] = self._launcher(binary, uses_pdl[wanted.stem])
            except CudaError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _launcher(self, binary: Binary, uses_pdl: bool) -> Launcher:
        return Launcher(self._driver, binary, self._device_index, uses_pdl=uses_pdl)


def bind_kernels(
    artifact: Artifact,
    program: ModuleType,
    device: torch.device,
    *,
    block_size: int = 16,
    is_pinned: bool = False,
) -> BoundKernels:
    """Bind plan and binaries of an artifact to the modules of its imported ``program.py``.

    The artifact's binaries for this architecture are loaded as they are: they are for all sizes of
    a step. Where there are none or the driver refuses one, what the program launches is found out
    by running it over all sizes on no device, which takes seconds, and compiled in parallel.
    ``is_pinned``: the artifact was asked for by its content id, which covers no binaries, so those
    in it are not used. Raises ArtifactError for a device that cannot run it, a plan that does not
    fit, and a kernel that does not compile.
    """
    index, arch = device_arch(device)
    make_context_current(index)
    shipped = None if is_pinned else ShippedBinaries(artifact.root, artifact.manifest.files)
    why = "the artifact is pinned by its content id, which covers no binaries"
    if shipped is not None:
        why = f"the artifact has no binaries of them for sm_{arch}"
    bound = BoundKernels(index, arch, CudaDriver.shared(), shipped=shipped, why=why)
    modules = list(kernel_modules(program))
    bind_plan(find_plan(artifact.root, torch.cuda.get_device_name(index), arch), modules, arch)
    for module in modules:
        for kernel in vars(module).values():
            if isinstance(kernel, Kernel):
                kernel.forget()
                kernel.loader = bound.load
    if not bound.load_shipped():
        launches = record_module(program, artifact.root, artifact.manifest, block_size=block_size)
        bound.prepare(launches)
    return bound


def device_arch(device: torch.device) -> tuple[int, int]:
    """Index and architecture of a GPU, 90 for sm_90. Raises ArtifactError for one too old."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ArtifactError(
            f"kernels run on an NVIDIA GPU, and {device} is none that works here; compile the "
            "model again with --target cpu"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    if 10 * major + minor < OLDEST_ARCH:
        raise ArtifactError(
            f"{torch.cuda.get_device_name(index)} is sm_{major}{minor}; kernels need sm_80 "
            "(Ampere) or later; compile the model again with --target cpu"
        )
    return index, 10 * major + minor


def load_unbound(kernel: Kernel, device_index: int, launch: Launch) -> Launcher:
    """The launcher of a kernel that belongs to no loaded artifact: a test's, a tuner's."""
    return unbound_kernels(device_index).load(kernel, device_index, launch)


@cache
def unbound_kernels(device_index: int) -> BoundKernels:
    """Kernels outside of artifacts, compiled when they are first launched or ``prepare``d."""
    _, arch = device_arch(torch.device("cuda", device_index))
    make_context_current(device_index)
    return BoundKernels(device_index, arch, CudaDriver.shared())
