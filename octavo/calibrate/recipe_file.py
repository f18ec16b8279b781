"""The recipe of a budget, beside its artifact: to be edited, and never written over when it was."""

from __future__ import annotations

import hashlib
import itertools
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = "# sha256 of the lines above, by which Octavo knows a file that nobody has edited: "


def write_recipe(artifact: Path, text: str) -> Path:
    """Write ``<artifact>.recipe.yaml``; returns where it is.

    A file that is there and has been edited, or is none of ours, is left: then the recipe gets the
    first number that is free, as in ``<artifact>.recipe-2.yaml``, with a notice.
    """
    usual = artifact.with_name(f"{artifact.name}.recipe.yaml")
    numbered = (artifact.with_name(f"{artifact.name}.recipe-{n}.yaml") for n in itertools.count(2))
    path = next(path for path in itertools.chain([usual], numbered) if _may_write(path))
    if path != usual:
        logger.warning("%s has been edited and is left: the new recipe is %s", usual, path)
    path.write_text(f"{text}{_MARK}{_digest(text)}\n", "utf-8")
    return path


def _may_write(path: Path) -> bool:
    """Whether there is nothing, or just what was written here."""
    try:
        text, mark, digest = path.read_text("utf-8").rpartition(_MARK)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False  # a folder, or no text: not ours
    return bool(mark) and digest == f"{_digest(text)}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
