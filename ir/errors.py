"""The errors that are the user's to fix."""

from __future__ import annotations


class OctavoError(Exception):
    """An error that is the user's to fix; its text is one line.

    The text says where, what was expected, what came, and what to do. The command line prints it
    without a traceback and exits with status 2.
    """


class VerifyError(OctavoError):
    """A graph that breaks a rule of the IR: names the value and the rule."""


class ParseError(OctavoError):
    """IR text that is not IR: names the line and what was expected there."""
