"""Folding of repeated layers in text: thirty copies of a body become one body and its count.

    repeat i = 0..29 {
      %layers.{i}.mlp: f32[T, 64] = linear(%layers.{i}.norm, @layers.{i}.mlp.weight)
    }

It works on lines alone and knows nothing of graphs: a run of blocks folds when the blocks differ in
nothing but integers, each of which grows by a constant step from block to block. Such an integer is
printed as a hole, ``{i}``, ``{i+1}`` or ``{2*i+3}``; ``expand(fold(lines)) == lines`` always.
"""

from __future__ import annotations

import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_REPEATS = 3
_OVERHEAD = 2  # lines that a fold adds: its head and its closing brace
_INDENT = "  "
_DIGITS = re.compile(r"(\d+)")
_HEAD = re.compile(r"(\s*)repeat i = (\d+)\.\.(\d+) \{")
_HOLE = re.compile(r"\{(?:(-?\d+)\*|(-))?i([+-]\d+)?\}")


class FoldError(ValueError):
    """A ``repeat`` block that cannot be expanded. ``line`` counts from 0."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Expanded:
    """A line after expansion: its text, the line of the folded text, and the value of ``i``."""

    text: str
    source: int
    index: int | None


def fold(lines: Sequence[str]) -> list[str]:
    """Print each run of similar blocks once. Nothing folds below three repeats."""
    parsed = [_Line.of(line) for line in lines]
    folded: list[str] = []
    for part in _plan(parsed, 0, len(parsed)):
        folded.extend(part.text(parsed))
    return folded


def expand(lines: Sequence[str]) -> list[str]:
    """Undo ``fold``. Raises FoldError for a malformed or unclosed block."""
    return [line.text for line in expand_lines(lines)]


def expand_lines(lines: Sequence[str]) -> Iterator[Expanded]:
    """Undo ``fold``, keeping track of where each line came from."""
    position = 0
    while position < len(lines):
        line = lines[position]
        if not line.lstrip().startswith("repeat "):
            yield Expanded(line, position, None)
            position += 1
            continue
        head = _HEAD.fullmatch(line.rstrip())
        if head is None:
            raise FoldError(position, "expected `repeat i = FIRST..LAST {`")
        stop = _closing(lines, position)
        for index in range(int(head[2]), int(head[3]) + 1):
            for offset in range(position + 1, stop):
                text = _fill(lines[offset].removeprefix(_INDENT), index)
                yield Expanded(text, offset, index)
        position = stop + 1


def _closing(lines: Sequence[str], head: int) -> int:
    for position in range(head + 1, len(lines)):
        stripped = lines[position].strip()
        if stripped == "}":
            return position
        if stripped.startswith("repeat "):
            raise FoldError(position, "a repeat inside a repeat: close the outer one first")
    raise FoldError(head, "this repeat is never closed: expected a line with `}`")


def _fill(text: str, index: int) -> str:
    def number(hole: re.Match[str]) -> str:
        scale = int(hole[1]) if hole[1] else -1 if hole[2] else 1
        return str(scale * index + int(hole[3] or 0))

    return _HOLE.sub(number, text)


@dataclass(frozen=True)
class _Line:
    """A line cut into text and integers: ``parts`` alternates, ``numbers`` are its odd members."""

    text: str
    skeleton: str
    parts: tuple[str, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> _Line:
        # A brace would be read as a hole, and a number with leading zeros would lose them: the
        # former keeps its line out of every fold, the latter counts as text.
        if "{" in text or "}" in text:
            return cls(text, text, (text,), ())
        parts = [""]
        for index, piece in enumerate(_DIGITS.split(text)):
            if index % 2 and (piece == "0" or piece[0] != "0"):
                parts += [piece, ""]
            else:
                parts[-1] += piece
        return cls(text, "\0".join(parts[::2]), tuple(parts), tuple(map(int, parts[1::2])))

    @property
    def folds(self) -> bool:
        return "{" not in self.text and "}" not in self.text


@dataclass(frozen=True)
class _Plain:
    """Lines that stay as they are."""

    start: int
    stop: int

    def text(self, lines: Sequence[_Line]) -> list[str]:
        return [line.text for line in lines[self.start : self.stop]]


@dataclass(frozen=True)
class _Fold:
    """``count`` blocks of ``period`` lines from ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        return (self.count - 1) * self.period - _OVERHEAD

    def text(self, lines: Sequence[_Line]) -> list[str]:
        base = _counter_base(lines, self)
        first = lines[self.start].text
        indent = first[: len(first) - len(first.lstrip())]
        body = [
            _INDENT + _with_holes(lines[j], _deltas(lines, j, self.period), base)
            for j in range(self.start, self.start + self.period)
        ]
        return [f"{indent}repeat i = {base}..{base + self.count - 1} {{", *body, indent + "}"]


def _plan(lines: Sequence[_Line], start: int, stop: int) -> Iterator[_Plain | _Fold]:
    """The fold that saves most, and then the same for what lies on either side."""
    best = _best(lines, start, stop)
    if best is None:
        yield _Plain(start, stop)
        return
    yield from _plan(lines, start, best.start)
    yield best
    yield from _plan(lines, best.stop, stop)


def _best(lines: Sequence[_Line], start: int, stop: int) -> _Fold | None:
    ids, sums = _columns(lines[start:stop])
    best: _Fold | None = None
    for period in range(1, len(ids) // MIN_REPEATS + 1):
        first, second, third = (slice(k * period, len(ids) - (2 - k) * period) for k in range(3))
        steady = (
            (ids[first] == ids[second])
            & (ids[second] == ids[third])
            & (sums[second] - sums[first] == sums[third] - sums[second])
        )
        for left, right in _runs(steady, period):
            found = _Fold(start + left, period, (right - left) // period + 2)
            # The shorter body wins a draw: it comes first.
            if found.saved > (best.saved if best else 0):
                best = found
    if best is None or not _is_exact(lines, best):
        return None
    return _aligned(lines, best, stop)


def _columns(lines: Sequence[_Line]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """For each line an id of its skeleton, and a random linear sum of its integers.

    The sums of three lines grow by a constant step just when each of their integers does, but for
    an accident of one in 2**64: all columns are compared at once.
    """
    known: dict[str, int] = {}
    ids = [
        known.setdefault(line.skeleton, len(known)) if line.folds else -1 - index
        for index, line in enumerate(lines)
    ]
    width = max((len(line.numbers) for line in lines), default=0)
    drawn = random.Random(0)
    factors = [drawn.getrandbits(64) for _ in range(width)]
    sums = [sum(map(operator.mul, line.numbers, factors)) % 2**64 for line in lines]
    return np.array(ids, dtype=np.int64), np.array(sums, dtype=np.uint64)


def _runs(flags: npt.NDArray[np.bool_], minimum: int) -> Iterator[tuple[int, int]]:
    """Maximal stretches of true, at least ``minimum`` long."""
    if np.count_nonzero(flags) < minimum:
        return
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    for left, right in edges.reshape(-1, 2).tolist():
        if right - left >= minimum:
            yield left, right


def _deltas(lines: Sequence[_Line], j: int, period: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(lines[j].numbers, lines[j + period].numbers, strict=True))


def _is_exact(lines: Sequence[_Line], found: _Fold) -> bool:
    return all(
        _continues(lines, j, found.period)
        for j in range(found.start, found.stop - 2 * found.period)
    )


def _continues(lines: Sequence[_Line], j: int, period: int) -> bool:
    """Whether a line and the two that follow it at a distance grow by a constant step."""
    trio = lines[j], lines[j + period], lines[j + 2 * period]
    if len({line.skeleton for line in trio}) > 1 or not trio[0].folds:
        return False
    return _deltas(lines, j, period) == _deltas(lines, j + period, period)


def _aligned(lines: Sequence[_Line], found: _Fold, limit: int) -> _Fold:
    """Shift a fold, where it has room, so that its body starts where a layer starts.

    The best body is the one with the most lines that agree in the counter of their first hole.
    """
    keys = [_key(lines, j, found.period) for j in range(found.start, found.start + found.period)]
    best, best_score = found, 0
    for shift in range(found.period):
        moved = _Fold(found.start + shift, found.period, found.count)
        # The line that the shift has newly taken in has to continue its column.
        if moved.stop > limit or (
            shift and not _continues(lines, moved.stop - 1 - 2 * moved.period, moved.period)
        ):
            break
        counts = Counter(key for key in keys if key is not None)
        score = max(counts.values(), default=0)
        if score > best_score:
            best, best_score = moved, score
        keys.append(_key(lines, found.start + shift + found.period, found.period))
        keys.pop(0)
    return best


def _key(lines: Sequence[_Line], j: int, period: int) -> int | None:
    """The counter's value that the first varying integer of a line stands for."""
    if j + period >= len(lines) or lines[j].skeleton != lines[j + period].skeleton:
        return None
    for number, delta in zip(lines[j].numbers, _deltas(lines, j, period), strict=True):
        if delta:
            return number // delta
    return None


def _counter_base(lines: Sequence[_Line], found: _Fold) -> int:
    """Where ``i`` starts: so that the most frequent hole is a plain ``{i}``."""
    counts: Counter[int] = Counter()
    for j in range(found.start, found.start + found.period):
        for number, delta in zip(lines[j].numbers, _deltas(lines, j, found.period), strict=True):
            if delta > 0:
                counts[number // delta] += 1
    return counts.most_common(1)[0][0] if counts else 0


def _with_holes(line: _Line, deltas: Sequence[int], base: int) -> str:
    parts = list(line.parts)
    for index, (number, delta) in enumerate(zip(line.numbers, deltas, strict=True)):
        if delta:
            scaled = {1: "i", -1: "-i"}.get(delta, f"{delta}*i")
            offset = number - delta * base
            parts[2 * index + 1] = f"{{{scaled}{offset:+d}}}" if offset else f"{{{scaled}}}"
    return "".join(parts)
