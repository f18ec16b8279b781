"""The text of a pointwise expression: ``t0 = add(a0, a1); mul(t0, sigmoid(t0))``.

``a0``, ``a1``... are the operands of the ``pointwise`` node. Calls name ops of the registry, with
attributes as keywords; a value that is read more than once is given a name, ``t0``, ``t1``...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from octavo.ir.errors import VerifyError

_WORDS = re.compile(
    r"""\s*(?:
    (?P<number>-?(?:inf|nan)\b|-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)
    |(?P<name>[A-Za-z_][\w.]*)
    |(?P<string>'[^']*')
    |(?P<mark>[(),;=\[\]])
    )""",
    re.VERBOSE,
)
_CONSTANTS = {"none": None, "true": True, "false": False}
_REFERENCE = re.compile(r"[at]\d+")

V = TypeVar("V")


@dataclass(frozen=True)
class Call:
    """An op applied to operands (``a0``), named values (``t0``) and calls, with attributes."""

    op: str
    arguments: tuple[Call | str, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        attrs = [f"{name}={_literal(value)}" for name, value in self.attrs]
        return f"{self.op}({', '.join([*map(str, self.arguments), *attrs])})"


@dataclass(frozen=True)
class Expression:
    """Values with a name, in order, and the call that gives the result."""

    named: tuple[tuple[str, Call], ...]
    result: Call

    def __str__(self) -> str:
        return "; ".join([*(f"{name} = {call}" for name, call in self.named), str(self.result)])


def evaluate(
    expression: Expression,
    operands: Sequence[V],
    apply: Callable[[str, list[V], dict[str, Any]], V],
) -> V:
    """The value of the result, where ``apply(op, arguments, attrs)`` gives that of each call.

    Raises VerifyError for a name that stands for nothing.
    """
    values = {f"a{index}": operand for index, operand in enumerate(operands)}

    def value(item: Call | str) -> V:
        if isinstance(item, Call):
            return apply(item.op, [value(each) for each in item.arguments], dict(item.attrs))
        if item not in values:
            raise VerifyError(f"{item} in `{expression}` stands for nothing")
        return values[item]

    for name, call in expression.named:
        values[name] = value(call)
    return value(expression.result)


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """Read an expression. Raises VerifyError with the place where the text stops making sense."""
    return _Parser(text).expression()


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    assert isinstance(value, int | float | str), f"no text for {value!r}"
    return f"'{value}'" if isinstance(value, str) else repr(value)


class _Parser:
    """Recursive descent over the words; one method a construct."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words: list[tuple[str, str, int]] = []  # kind, word, position
        position = 0
        while text[position:].strip():
            found = _WORDS.match(text, position)
            if found is None:
                self._fail(position)
            kind = str(found.lastgroup)
            self.words.append((kind, found[kind], position))
            position = found.end()
        self.words.append(("end", "", position))
        self.at = 0

    def expression(self) -> Expression:
        named: list[tuple[str, Call]] = []
        while self.words[self.at + 1 : self.at + 2] and self.words[self.at + 1][1] == "=":
            name = self._take("name")
            self._expect("=")
            named.append((name, self._call()))
            self._expect(";")
        result = self._call()
        self._take("end")
        return Expression(tuple(named), result)

    def _call(self) -> Call:
        op = self._take("name")
        self._expect("(")
        arguments: list[Call | str] = []
        attrs: list[tuple[str, Any]] = []
        while not self._accept(")"):
            if arguments or attrs:
                self._expect(",")
            if self.words[self.at + 1][1] == "=":
                name = self._take("name")
                self._expect("=")
                attrs.append((name, self._value()))
            elif self.words[self.at + 1][1] == "(":
                arguments.append(self._call())
            elif _REFERENCE.fullmatch(self.words[self.at][1]):
                arguments.append(self._take("name"))
            else:
                self._fail(self.words[self.at][2])
        return Call(op, tuple(arguments), tuple(attrs))

    def _value(self) -> Any:
        kind, word, position = self.words[self.at]
        self.at += 1
        if kind == "number":
            return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
        if kind == "string":
            return word[1:-1]
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if word != "[":
            self._fail(position)
        items: list[Any] = []
        while not self._accept("]"):
            if items:
                self._expect(",")
            items.append(self._value())
        return tuple(items)

    def _take(self, kind: str) -> str:
        found, word, position = self.words[self.at]
        if found != kind:
            self._fail(position)
        self.at += 1
        return word

    def _accept(self, mark: str) -> bool:
        if self.words[self.at][1] != mark:
            return False
        self.at += 1
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            self._fail(self.words[self.at][2])

    def _fail(self, position: int) -> NoReturn:
        rest = self.text[position:].strip() or "the end"
        raise VerifyError(f"pointwise: no expression in `{self.text}`, at `{rest}`")
