"""Compiled kernels that are kept for the next who needs the same ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from octavo.runtime.cache_directory import cache_directory
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel_binary import Binary, Specialisation

logger = logging.getLogger(__name__)


def _root() -> Path:
    return cache_directory() / "kernels"


@dataclass
class BinaryCache:
    """Binaries by specialisation, ``sm_90/<stem>`` below ``root``; processes may share it.

    It only ever saves work: a binary that is damaged counts as absent, and where nothing can be
    written nothing is kept, with one line of notice.
    """

    root: Path = field(default_factory=_root)
    _is_writable: bool = True

    def folder(self, arch: int) -> Path:
        """Where the binaries for an architecture are, 90 for sm_90."""
        return self.root / f"sm_{arch}"

    def find(
        self, wanted: Specialisation, *, toolchain: tuple[str, str] | None = None
    ) -> Binary | None:
        """The binary, None if there is none, or none by this ``toolchain`` (Triton's version and
        its assembler's), if one is given."""
        try:
            binary = Binary.read(self.folder(wanted.arch), wanted.stem)
        except (ArtifactError, OSError):
            return None
        if binary is None or toolchain is None:
            return binary
        return binary if (binary.info.triton, binary.info.ptxas) == toolchain else None

    def keep(self, wanted: Specialisation, binary: Binary) -> None:
        """Write a binary for others to find; one that is there already is replaced."""
        if not self._is_writable:
            return
        try:
            binary.write(self.folder(wanted.arch), wanted.stem)
        except OSError as error:
            self._is_writable = False
            logger.warning(
                "compiled kernels cannot be kept in %s (%s); set OCTAVO_CACHE to a directory that "
                "can be written",
                self.folder(wanted.arch),
                error.strerror or error,
            )
