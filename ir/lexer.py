"""Words of the text form, and errors that point at them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from octavo.ir.errors import ParseError
from octavo.ir.fold import Expanded, FoldError, expand_lines

_WORDS = re.compile(
    r"""
      (?P<space>[ \t\r]+)
    | (?P<comment>//.*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<value>[%@][\w.~\-]+)
    | (?P<number>[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
    | (?P<word>-?inf\b|[A-Za-z_][\w.]*)
    | (?P<operand>\$\d+)
    | (?P<mark>[(){}\[\]<>,:=*/])
    | (?P<other>.)
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A word: what it is, its text, and where it stands in the expanded text (from 0)."""

    kind: str
    text: str
    line: int
    column: int


class Source:
    """A text with its ``repeat`` blocks expanded, that can report an error at a token."""

    def __init__(self, text: str, name: str, first_line: int) -> None:
        self.name = name
        self.first_line = first_line
        original = text.splitlines()
        try:
            self.lines = list(expand_lines(original))
        except FoldError as error:
            self.lines = [Expanded(line, index, None) for index, line in enumerate(original)]
            indent = len(original[error.line]) - len(original[error.line].lstrip())
            self.fail(str(error), error.line, indent)
        self.comments: dict[int, str] = {}

    def tokens(self) -> Iterator[Token]:
        """All words, then one of kind ``end``; comments are set aside, by line."""
        for number, line in enumerate(self.lines):
            for match in _WORDS.finditer(line.text):
                kind = match.lastgroup or ""
                if kind == "comment":
                    self.comments[number] = match[0][2:].strip()
                elif kind == "other":
                    self.fail(f"unexpected character {match[0]!r}", number, match.start())
                elif kind != "space":
                    yield Token(kind, match[0], number, match.start())
        last = max(len(self.lines) - 1, 0)
        yield Token("end", "", last, len(self.lines[last].text) if self.lines else 0)

    def fail(self, reason: str, line: int, column: int) -> NoReturn:
        """Raise ParseError: file, line, column, the line, and a caret under the spot."""
        shown = self.lines[line] if self.lines else Expanded("", 0, None)
        place = f"{self.name}:{self.first_line + shown.source}:{column + 1}"
        inside = "" if shown.index is None else f" (at i = {shown.index})"
        raise ParseError(f"{place}: {reason}{inside}\n{shown.text}\n{' ' * column}^")
