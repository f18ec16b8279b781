"""Checks on values that come from a user: each returns the clean value or raises InvalidRequest.

``name`` is what the message begins with, and tells which parameter it is: "temperature", "each of
stop_token_ids", "structured_outputs: regex", "prompt 3".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from octavo.runtime.errors import InvalidRequest


def refusal(name: str, problem: str) -> InvalidRequest:
    """The error for a parameter with a problem."""
    found = re.search(r"[a-z_]+(?=( \d+)?$)", name.split(":")[0])
    return InvalidRequest(f"{name} {problem}", param=found[0] if found else None)


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """An int in ``[low, high]``. A bool is no int here, a NumPy integer is one."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refusal(name, f"must be an integer, got {value!r}")
    number = int(value)
    if low is not None and number < low:
        raise refusal(name, f"must be at least {low}, got {number}")
    if high is not None and number > high:
        raise refusal(name, f"must be at most {high}, got {number}")
    return number


def real(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """A finite float in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refusal(name, f"must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise refusal(name, f"must be finite, got {number}")
    if low is not None and number < low:
        raise refusal(name, f"must be at least {low:g}, got {number:g}")
    if high is not None and number > high:
        raise refusal(name, f"must be at most {high:g}, got {number:g}")
    return number


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, f"must be True or False, got {value!r}")
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """None, one non-empty string or a list of them."""
    items = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise refusal(name, f"must be a string or a list of strings, got {value!r}")
    if "" in items:
        raise refusal(name, "holds an empty string, which would match everywhere")
    for item in items:
        check_unicode(name, item)
    return tuple(items)


def check_unicode(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which no text can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refusal(name, f"is not valid Unicode: {error.reason}") from None


def token_ids(name: str, value: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """None or a list of token ids: ints from 0 to below ``vocab_size``, if that is known."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refusal(name, f"must be a list of integers, got {value!r}")
    # A long list of plain ints is the usual case: a few passes in C instead of a call each.
    if not set(map(type, value)) <= {int}:
        value = [integer(f"each of {name}", item) for item in value]
    if value:
        check_token_id(name, min(value), vocab_size)
        check_token_id(name, max(value), vocab_size)
    return tuple(value)


def check_token_id(name: str, token_id: int, vocab_size: int | None = None) -> None:
    """Refuse an id that is negative, or not in the vocabulary if its size is known."""
    if vocab_size is None:
        if token_id < 0:
            raise refusal(f"each of {name}", f"must be at least 0, got {token_id}")
    elif not 0 <= token_id < vocab_size:
        raise refusal(
            f"{name}:",
            f"token id {token_id} is not in the vocabulary of {vocab_size} tokens "
            f"(0 to {vocab_size - 1})",
        )


def token_weights(name: str, value: Any, limit: float) -> dict[int, float]:
    """None or ``{token id: number}``, numbers clamped to ``[-limit, limit]``.

    An id may be a string of digits, as the keys of JSON are.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal(name, f"must be a dict of token id to number, got {value!r}")
    weights: dict[int, float] = {}
    for key, weight in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = integer(f"each token id of {name}", int(key) if is_digits else key)
        number = real(f"the weight of token {token_id} in {name}", weight)
        weights[token_id] = max(-limit, min(limit, number))
    token_ids(name, list(weights))
    return weights
