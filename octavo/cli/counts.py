"""Options that list numbers: ``--batch-size 1,4,8``."""

from __future__ import annotations

import re

from octavo.ir.errors import OctavoError


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """The numbers in order, each once. Raises OctavoError for anything else."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise OctavoError(f"{option} {text!r}: expected numbers with commas, such as 1,4,8,16")
    return tuple(sorted({int(size) for size in text.split(",")}))
