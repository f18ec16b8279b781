"""The layers that names speak of."""

from __future__ import annotations

import re


def layer_of(name: str) -> int | None:
    """The layer in a value's name: the first number among the parts of its path."""
    found = re.search(r"(?:^|[.@%])(\d+)(?=[.~]|$)", name)
    return int(found.group(1)) if found else None
