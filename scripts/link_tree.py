"""Lay the tree of links that mypy and the import linter read.

``.mypy/octavo/ir/graph.py`` is a link to ``ir/graph.py``, and so on for each Python file. Both
tools want a package's folders below one another, as they lie in a wheel, and know nothing of
setuptools' ``package-dir``. The folders are real and only the files are links, because the import
linter does not follow links to folders.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Replace the tree by one that matches the packages as they are now."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tree = ROOT / ".mypy"
    shutil.rmtree(tree / "octavo", ignore_errors=True)
    for package, folder in config["tool"]["setuptools"]["package-dir"].items():
        link_sources(ROOT / folder, tree / package.replace(".", "/"))


def link_sources(source: Path, goal: Path) -> None:
    """Link each Python file below ``source`` at its place below ``goal``."""
    for pattern in ("*.py", "py.typed"):
        for path in sorted(source.rglob(pattern)):
            link = goal / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(path, link.parent))


if __name__ == "__main__":
    main()
