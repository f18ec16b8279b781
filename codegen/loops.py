"""Calls of one body in a row become a loop: thirty layers read as three lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MIN_CALLS = 3


@dataclass(frozen=True)
class CallText:
    """A call of a layer's function: the ``number``-th of its body, with texts for its values."""

    body: str
    number: int
    targets: tuple[str, ...]
    arguments: tuple[str, ...]

    def statement(self, holder: str) -> str:
        """The call, with the layer's weights taken from ``holder``."""
        result = f"{', '.join(self.targets)} = " if self.targets else ""
        return f"{result}self._{self.body}({', '.join((holder, 'b', *self.arguments))})"

    def continues(self, first: CallText, second: CallText) -> bool:
        """True when this call belongs to the loop that ``first`` and ``second`` started."""
        return self.body == first.body and (self.targets, self.arguments) == (
            second.targets,
            second.arguments,
        )

    def is_started_by(self, first: CallText) -> bool:
        """True when this call differs from the one before only in what that one hands on."""
        return (
            (self.body, self.targets) == (first.body, first.targets)
            and self.number == first.number + 1
            and all(a == b or b in self.targets for a, b in _pairs(first, self))
        )


def fold_calls(
    lines: Sequence[str], calls: Mapping[int, CallText], counts: Mapping[str, int]
) -> list[str]:
    """Statements in which runs of calls are loops.

    ``calls`` says which of the lines are calls; ``counts`` how many calls a body has in all.
    """
    folded: list[str] = []
    index = 0
    while index < len(lines):
        run = list(_run(index, calls))
        if len(run) >= MIN_CALLS:
            folded += _loop(run, counts[run[0].body])
            index += len(run)
            continue
        folded.append(lines[index])
        index += 1
    return folded


def _run(index: int, calls: Mapping[int, CallText]) -> Iterator[CallText]:
    """The calls from a line on that one loop can make."""
    first, second = calls.get(index), calls.get(index + 1)
    if first is None:
        return
    yield first
    if second is None or not second.is_started_by(first):
        return
    while (call := calls.get(index + 1)) is not None and call.continues(first, second):
        yield call
        index += 1


def _loop(run: Sequence[CallText], count: int) -> Iterator[str]:
    first, second = run[0], run[1]
    carried = {b: a for a, b in _pairs(first, second) if a != b}
    if carried:
        yield f"{', '.join(carried)} = {', '.join(carried.values())}"
    layers = f"self.{first.body}s"
    if len(run) < count:
        layers += f"[{first.number}:{first.number + len(run)}]"
    yield f"for w in {layers}:"
    yield f"    {second.statement('w')}"


def _pairs(first: CallText, second: CallText) -> Iterator[tuple[str, str]]:
    return zip(first.arguments, second.arguments, strict=True)
