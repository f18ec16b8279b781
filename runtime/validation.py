"""Checks on values that come from a user: each returns the clean value or raises InvalidRequest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from octavo.runtime.errors import InvalidRequest


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """An int in ``[low, high]``. A bool is no int here, a NumPy integer is one."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if low is not None and number < low:
        raise InvalidRequest(f"{name} must be at least {low}, got {number}")
    if high is not None and number > high:
        raise InvalidRequest(f"{name} must be at most {high}, got {number}")
    return number


def real(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """A finite float in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be finite, got {number}")
    if low is not None and number < low:
        raise InvalidRequest(f"{name} must be at least {low:g}, got {number:g}")
    if high is not None and number > high:
        raise InvalidRequest(f"{name} must be at most {high:g}, got {number:g}")
    return number


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}")
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """None, one non-empty string or a list of them."""
    items = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"{name} must be a string or a list of strings, got {value!r}")
    if "" in items:
        raise InvalidRequest(f"{name} holds an empty string, which would match everywhere")
    return tuple(items)


def integers(name: str, value: Any, low: int = 0, high: int | None = None) -> tuple[int, ...]:
    """None or a list of ints in ``[low, high]``."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list of integers, got {value!r}")
    return tuple(integer(f"each of {name}", item, low, high) for item in value)
