"""The files of text cases: what a pass gets, and what it has to make of it.

// What this case proves, in a line or two.
graph @before(...) { ... }
// -----
graph @after(...) { ... }
// missed: %norm: its input is not an add
// =====
// The next case.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CASES = Path(__file__).parent / "cases"

_BETWEEN = "// =====\n"
_HALVES = "// -----\n"
_MISSED = "// missed: "


@dataclass(frozen=True)
class Case:
    """One case. ``missed`` lists ``<value>: <reason>``, in order; ``after`` is exact."""

    pass_name: str
    index: int
    comment: str
    before: str
    after: str
    missed: tuple[str, ...]

    @property
    def id(self) -> str:
        """``fuse-add-norm:residual``, as pytest shows it."""
        head = self.before.partition("@")[2]
        return f"{self.pass_name}:{head.partition('(')[0]}"

    def text(self) -> str:
        """The case as it stands in its file."""
        missed = "".join(f"{_MISSED}{line}\n" for line in self.missed)
        return f"{self.comment}{self.before}{_HALVES}{self.after}{missed}"


def read_cases(path: Path) -> list[Case]:
    """The cases of one file, in order."""
    texts = path.read_text().split(_BETWEEN)
    return [_case(path.stem, index, text) for index, text in enumerate(texts)]


def write_cases(path: Path, cases: list[Case]) -> None:
    """Write a file of cases."""
    path.write_text(_BETWEEN.join(case.text() for case in cases))


def _case(pass_name: str, index: int, text: str) -> Case:
    before, _, after = text.partition(_HALVES)
    start = before.index("graph @")
    lines = after.splitlines(keepends=True)
    missed = [line[len(_MISSED) :].strip() for line in lines if line.startswith(_MISSED)]
    return Case(
        pass_name=pass_name,
        index=index,
        comment=before[:start],
        before=before[start:],
        after="".join(line for line in lines if not line.startswith(_MISSED)),
        missed=tuple(missed),
    )
