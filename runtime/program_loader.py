"""Imports an artifact's program as a package of its own, from listed files only."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from octavo.ir.manifest import Manifest
from octavo.runtime.errors import ArtifactError


def import_program(root: Path, manifest: Manifest) -> ModuleType:
    """The module of ``program.py``, imported under a name made of the content id.

    Nothing is written into the artifact, and ``sys.path`` is not touched. Two artifacts of one
    content share the module: equal content is equal behaviour.
    """
    package = "octavo_artifact_" + manifest.artifact_id.removeprefix("sha256:")
    if not any(isinstance(f, ListedSources) and f.package == package for f in sys.meta_path):
        sys.meta_path.append(ListedSources(package, root, manifest))
    try:
        return importlib.import_module(f"{package}.program")
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"{root}: program.py cannot be imported ({type(error).__name__}: {error}); it may need "
            "a package that is not installed here, see `producer` in manifest.json"
        ) from error


class ListedSources(MetaPathFinder, ExecutionLoader):
    """Finds and loads the modules of one artifact: its listed ``.py`` files and their folders.

    A source is compiled from bytes that were hashed in the same breath, so what runs is what the
    manifest names, and no byte-code cache is read or written.
    """

    def __init__(self, package: str, root: Path, manifest: Manifest) -> None:
        self.package = package
        self._root = root
        self._sources = {n: e.sha256 for n, e in manifest.files.items() if n.endswith(".py")}
        self._texts: dict[str, str] = {}  # read: the folder may be moved, as a compile's is

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(self.package + "."):
            return None
        if not self.is_package(fullname) and self._source_name(fullname) not in self._sources:
            return None
        spec = spec_from_loader(fullname, self)
        if spec is not None and self.is_package(fullname):
            # An empty path: Python's own finder must not look into the folder behind our back.
            spec.submodule_search_locations = []
        return spec

    def is_package(self, fullname: str) -> bool:
        folder = self._stem(fullname)
        return not folder or any(name.startswith(folder + "/") for name in self._sources)

    def get_filename(self, fullname: str) -> str:
        return str(self._root / self._source_name(fullname))

    def get_source(self, fullname: str) -> str:
        name = self._source_name(fullname)
        if name not in self._sources:
            return ""  # a folder without __init__.py
        if name in self._texts:
            return self._texts[name]
        content = (self._root / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != self._sources[name]:
            raise ArtifactError(
                f"{self._root}: {name} has changed since it was checked; load it again"
            )
        return self._texts.setdefault(name, content.decode("utf-8"))

    def _stem(self, fullname: str) -> str:
        return fullname[len(self.package) + 1 :].replace(".", "/")

    def _source_name(self, fullname: str) -> str:
        stem = self._stem(fullname)
        if self.is_package(fullname):
            return f"{stem}/__init__.py".lstrip("/")
        return f"{stem}.py"
