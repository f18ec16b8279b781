"""The error for a model that cannot be compiled correctly."""

from __future__ import annotations

from octavo.ir.errors import OctavoError


class RefusedArchitecture(OctavoError):
    """A model that Octavo would get wrong, or cannot trace: its text is the one-line reason."""


def gist(error: BaseException) -> str:
    """The first line that says something, of the innermost error that has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
