"""What the runtime refuses, by whose hand it can be put right."""

from __future__ import annotations

from octavo.ir.errors import OctavoError


class ArtifactError(OctavoError):
    """An artifact that is not whole, not readable by this version, or not the one asked for."""


class InvalidRequest(OctavoError, ValueError):
    """A prompt, sampling parameter or option with an impossible value; nothing was run.

    ``param`` is its name, where it has one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(OctavoError):
    """Memory that does not hold what was asked for."""


class EngineError(OctavoError):
    """A step that failed; the requests in it were ended and their memory was given back."""


class InvariantError(AssertionError):
    """A checker found the books in disorder: a fault of Octavo's own."""


def require(holds: bool, problem: str) -> None:
    """Raise InvariantError unless ``holds``. Unlike ``assert`` it is there under ``python -O``."""
    if not holds:
        raise InvariantError(problem)


class QueueFull(OctavoError):
    """As many requests wait as may; the request was not taken, and may be sent again later."""


class EngineStopped(OctavoError):
    """The engine takes no more requests: it drains, or was shut down."""


class EngineDeadError(EngineError):
    """The engine cannot run any step any more; its process has to be started again."""
