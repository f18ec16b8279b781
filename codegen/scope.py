"""What a function of the program calls things, and how it fetches its weights."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.ir.graph import Value

_LAYER_PREFIX = re.compile(r"^(?:.*\.)?(?:layers|layer|h|blocks|block)\.\d+(?:\.|$)")


class Names:
    """Python identifiers for values: short, readable, unique within one scope."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)

    def new(self, name: str) -> str:
        """An identifier for a module path: ``layers.3.mlp.up`` gives ``mlp_up``."""
        stem = re.sub(r"\W+", "_", _LAYER_PREFIX.sub("", name)).strip("_") or "hidden"
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"v_{stem}"
        found, count = stem, 1
        while found in self._taken:
            count += 1
            found = f"{stem}_{count}"
        self._taken.add(found)
        return found


@dataclass(frozen=True)
class Field:
    """A weight or cache that is fetched once, at load, and the expression that fetches it."""

    name: str
    bound: str
    comment: str = ""
    annotation: str = "Tensor"


@dataclass(frozen=True)
class Bound:
    """A form in which a function reads a weight: whole, one part of a quantised one, or prepared.

    ``parts`` are those that are fetched, none of a whole tensor; ``prepare`` names the module
    whose ``prepare`` they go through.
    """

    value: Value
    parts: tuple[str, ...] = ()
    prepare: str | None = None

    @property
    def name(self) -> str:
        """What the field is called."""
        return self.value.name if len(self.parts) != 1 else f"{self.value.name}.{self.parts[0]}"

    def expression(self, key: str, *, is_literal: bool) -> str:
        """How it is fetched; ``key`` is the weight's name, in quotes if it is a literal."""
        keys = [_part_key(key, part, is_literal) for part in self.parts] or [key]
        fetched = ", ".join(f"weights[{key}]" for key in keys)
        return f"{self.prepare}.prepare({fetched})" if self.prepare else fetched


def _part_key(key: str, part: str, is_literal: bool) -> str:
    return f'{key[:-1]}.{part}"' if is_literal else f'{key} + ".{part}"'


@dataclass
class Scope:
    """One function of the program: what its lines call things, and its statements so far."""

    holder: str  # where weights are: `w` or `self`
    names: dict[Value, str] = field(default_factory=dict)
    weights: dict[Bound, str] = field(default_factory=dict)
    caches: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by slot
    lines: list[str] = field(default_factory=list)
    module: str | None = None
