"""Reading an attention mask off the predicate that transformers builds it from.

A mask function of transformers maps (batch, head, query index, key index) to bool and broadcasts.
It is evaluated on rows of real indices, so that a window of any length is found, and the answer is
a description instead of a tensor.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.frontend.refused import RefusedArchitecture, gist
from octavo.ir.ops.attention import allowed_pairs

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_DENSE_ROWS = 48  # every early row is looked at, then a sample


@dataclass(frozen=True)
class MaskDescription:
    """Which keys a query sees; stands where a model expects its mask tensor.

    ``window`` counts the query itself, ``chunk`` is the length of blocks that ignore each other.
    """

    window: int | None = None
    chunk: int | None = None


def probe_mask(predicate: Predicate, length: int) -> MaskDescription:
    """Describe a mask over positions ``0 .. length - 1``.

    Raises RefusedArchitecture when it is not causal, nor causal within a window or chunks.
    """
    # The modes of a running export would record these operations into the graph.
    with _disable_current_modes():
        row = _row_reader(_without_padding(predicate), length)
        description = _describe(row, length)
        for index in _sample(description, length):
            ticks = torch.arange(length)
            expected = allowed_pairs(
                torch.tensor([index]), ticks, True, description.window, description.chunk
            )
            if not torch.equal(row(index), expected[0]):
                raise RefusedArchitecture(
                    "its attention mask is neither causal, nor a sliding window, nor chunks:"
                    f" the query at position {index} sees {int(row(index).sum())} keys,"
                    f" expected {int(expected.sum())}"
                )
    return description


def _row_reader(predicate: Predicate, length: int) -> Callable[[int], Tensor]:
    """A function from a query's position to bool ``[length]``."""
    zero = torch.zeros(1, 1, dtype=torch.long)
    keys = torch.arange(length)[None, :]

    def row(index: int) -> Tensor:
        try:
            seen = predicate(zero, zero, torch.tensor([[index]]), keys)
        except Exception as error:  # a predicate is the model's own code
            raise RefusedArchitecture(
                f"its attention mask cannot be read: {gist(error)}"
            ) from error
        return seen.expand(1, length)[0].bool()

    return row


def _describe(row: Callable[[int], Tensor], length: int) -> MaskDescription:
    """A hypothesis from the first query that does not see position 0."""

    def first_seen(index: int) -> int:
        return int(row(index).int().argmax())

    if first_seen(length - 1) == 0:
        return MaskDescription()
    low, high = 0, length - 1  # low sees position 0, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first_seen(middle) == 0 else (low, middle)
    return MaskDescription(chunk=high) if 1 < high == first_seen(high) else MaskDescription(high)


def _sample(description: MaskDescription, length: int) -> list[int]:
    """Positions to check: all early ones, both sides of each boundary, and some far ones."""
    edge = description.window or description.chunk or 1
    near = [edge + step for step in (-1, 0, 1)] + [2 * edge + step for step in (-1, 0, 1)]
    far = [length // 3, length // 2, length * 5 // 7, length - 2, length - 1]
    wanted = {*range(_DENSE_ROWS), *near, *far}
    return sorted(index for index in wanted if 0 <= index < length)


def _without_padding(predicate: Any) -> Any:
    """The predicate with its padding tensor (traced, so it has no numbers) set to no padding.

    Raises RefusedArchitecture for any other tensor that it closes over.
    """
    if not isinstance(predicate, types.FunctionType) or not predicate.__closure__:
        return predicate
    cells = [
        types.CellType(_cell(name, cell.cell_contents))
        for name, cell in zip(predicate.__code__.co_freevars, predicate.__closure__, strict=True)
    ]
    return types.FunctionType(
        predicate.__code__,
        predicate.__globals__,
        predicate.__name__,
        predicate.__defaults__,
        tuple(cells),
    )


def _cell(name: str, content: Any) -> Any:
    if isinstance(content, Tensor):
        if (
            name == "left_padding"
        ):  # transformers.masking_utils.chunked_overlay: one row, none padded
            return torch.zeros(1, dtype=torch.long)
        raise RefusedArchitecture(f"its attention mask depends on a tensor, {name}")
    if isinstance(content, tuple | list):
        return type(content)(_cell(name, item) for item in content)
    return _without_padding(content)
