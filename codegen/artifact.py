"""Writing an artifact directory: beside its goal, whole or not at all."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from octavo.ir.errors import OctavoError
from octavo.ir.manifest import FileEntry, Manifest

ROLES = {
    "program.py": "program",
    "kernels": "kernel",
    "weights": "weight",
    "plans": "plan",
    "model": "model",
    "ir": "ir",
    "tests": "test",
}
_PIECE = 1 << 20  # bytes hashed at a time


class _Missed(Protocol):
    @property
    def where(self) -> str: ...
    @property
    def reason(self) -> str: ...


class StageText(Protocol):
    """What is kept of a stage of the pipeline."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def rewrites(self) -> int: ...
    @property
    def missed(self) -> Sequence[_Missed]: ...
    @property
    def num_nodes(self) -> int: ...


@dataclass
class ArtifactWriter:
    """Context manager that builds an artifact in ``directory``, a hidden sibling of ``output``.

    Leaving it normally after ``finish`` moves the artifact into place; leaving it by an exception,
    Ctrl-C included, removes what was written. With ``force`` an older artifact, or an empty
    directory, is replaced at that last moment; any other directory is never touched. Raises
    OctavoError for an output that exists, and for a disk that is full or cannot be written.
    """

    output: Path
    force: bool = False

    def __post_init__(self) -> None:
        self.output = Path(os.path.abspath(self.output))
        self.directory = self.output.parent / f".{self.output.name}.partial-{os.getpid()}"
        self.is_finished = False
        self._made_parents: list[Path] = []

    def __enter__(self) -> ArtifactWriter:
        self._check_output()
        return self

    def begin(self) -> None:
        """Make the directory; call it first inside the ``with``. An interrupt between ``__enter__``
        and the body is seen by no ``__exit__``, so nothing may have been made by then."""
        self._made_parents = [p for p in self.output.parents if not p.exists()]
        try:
            self._sweep()
            self.directory.mkdir(parents=True)
        except OSError as error:
            raise self._explained(error) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None and self.is_finished:
                self._move_into_place()
                return
        except OSError as problem:
            raise self._explained(problem) from None
        finally:
            with _uninterrupted():
                self._remove()
        if isinstance(error, OSError) and _is_about_writing(error, self.directory):
            raise self._explained(error) from None
        wrapped = _system_error(error)
        if wrapped is not None:
            raise self._explained(wrapped) from None

    def write_text(self, path: str, text: str) -> None:
        """Write a text file of the artifact."""
        goal = self.directory / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(text, encoding="utf-8", newline="\n")

    def write_stages(self, stages: Iterable[StageText]) -> None:
        """Write ``ir/NN-<pass>.ir`` of every stage and ``ir/index.json``; no times, so that equal
        input gives equal files."""
        index = []
        for stage in stages:
            file = f"{stage.number:02}-{stage.name}.ir"
            self.write_text(f"ir/{file}", stage.text)
            index.append(
                {
                    "number": stage.number,
                    "name": stage.name,
                    "file": file,
                    "rewrites": stage.rewrites,
                    "missed": [{"where": m.where, "reason": m.reason} for m in stage.missed],
                    "nodes": stage.num_nodes,
                }
            )
        self.write_text("ir/index.json", json.dumps({"stages": index}, indent=2) + "\n")

    def draft(self, **fields: Any) -> Manifest:
        """A manifest of the code alone, by which the program can be imported before the end."""
        return Manifest(files=list_files(self.directory, is_wanted=_is_code), **fields)

    def finish(self, **fields: Any) -> Manifest:
        """Hash every file and write ``manifest.json``, the last; keywords are the manifest's fields
        besides ``files``. The artifact can be opened in ``directory`` from here on.
        """
        manifest = Manifest(files=list_files(self.directory), **fields)
        self.write_text("manifest.json", manifest.to_json())
        self.is_finished = True
        return manifest

    def add_text(self, manifest: Manifest, path: str, text: str) -> Manifest:
        """Write one more text file of a finished artifact, and its manifest with it: what was
        hashed is not read again."""
        self.write_text(path, text)
        manifest = replace(manifest, files=manifest.files | {path: _entry(self.directory, path)})
        self.write_text("manifest.json", manifest.to_json())
        return manifest

    def _check_output(self) -> None:
        output = self.output
        if not os.path.lexists(output):
            return
        if not self.force:
            raise OctavoError(
                f"{output} exists; choose another directory or replace it with --force"
            )
        if output.is_symlink():
            raise OctavoError(
                f"{output} is a link to {output.resolve()}; --force replaces no links, so remove it"
                " or name the directory itself"
            )
        if not output.is_dir():
            raise OctavoError(f"{output} is not a directory; --force replaces only an artifact")
        is_artifact = (output / "manifest.json").is_file() and (output / "program.py").is_file()
        try:
            is_empty = not any(output.iterdir())
        except OSError as error:
            raise self._explained(error) from None
        if not is_artifact and not is_empty:
            raise OctavoError(
                f"{output} is not an artifact (it has no manifest.json); --force replaces only an "
                "artifact or an empty directory, so choose another one"
            )

    def _sweep(self) -> None:
        """Remove what processes that were killed have left: ours, or of an id that nobody has."""
        own = self.directory.name.removesuffix(str(os.getpid()))
        for path in self.output.parent.glob(f"{glob.escape(own)}*"):
            process_id = path.name.removeprefix(own)
            is_ours = path == self.directory
            if is_ours or (process_id.isdecimal() and not _is_alive(int(process_id))):
                shutil.rmtree(path, ignore_errors=True)

    def _move_into_place(self) -> None:
        self._check_output()  # hours may have passed
        if not self.output.exists():
            self.directory.rename(self.output)
            return
        old = self.output.parent / f".{self.output.name}.old-{os.getpid()}"
        self.output.rename(old)
        try:
            self.directory.rename(self.output)
        except BaseException:
            old.rename(self.output)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        for parent in self._made_parents:
            try:
                parent.rmdir()  # only a directory that we made and nobody has filled
            except OSError:
                return

    def _explained(self, error: OSError) -> OctavoError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return OctavoError(
                f"no space left while writing {self.output}; free some or choose another directory"
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return OctavoError(
                f"no permission to write {self.output}; choose a directory that you own"
            )
        reason = error.strerror or str(error)
        return OctavoError(f"{self.output} cannot be written: {reason}")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for a moment: a second one would stop the removal half way."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive elsewhere
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None stands for a handler that is not Python's, which could not be put back.
    replaced = {number: handler for number, handler in before.items() if handler is not None}
    for number in replaced:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def list_files(
    directory: Path, is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, FileEntry]:
    """Size, hash and role of every file under a directory, by its path from there."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_listed = path.is_file() and name != "manifest.json" and "__pycache__" not in path.parts
        if is_listed and is_wanted(name):
            found[name] = _entry(directory, name)
    return found


def _entry(directory: Path, name: str) -> FileEntry:
    path = directory / name
    return FileEntry(path.stat().st_size, _sha256(path), _role(name))


def _is_code(name: str) -> bool:
    return _role(name) in ("program", "kernel")


def _role(name: str) -> str:
    return ROLES.get(name.split("/")[0], "other")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True


def _is_about_writing(error: OSError, directory: Path) -> bool:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return error.filename is not None and str(error.filename).startswith(str(directory))


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error that safetensors wraps in one of its own, which has it only as text."""
    if type(error).__name__ != "SafetensorError":
        return None
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
