"""The block tables of a step as one array, carried on from the step before."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.block_groups import FULL, BlockGroup
from octavo.runtime.block_manager import Tables
from octavo.runtime.block_pool import NULL_BLOCK


class BlockTables:
    """The tables of all block groups: ``[S, B]``, or ``[G, S, B]`` where there are several."""

    def __init__(self, groups: Sequence[BlockGroup] = (FULL,)) -> None:
        self._groups = [_GroupTables(is_windowed=not group.is_full) for group in groups]
        self._parts: list[NDArray[np.int32]] = []
        self._stacked: NDArray[np.int32] = np.zeros((0, 0, 0), dtype=np.int32)

    def gather(self, tables: Sequence[Tables]) -> NDArray[np.int32]:
        """Tables as wide as the longest needs, padded with the null block.

        The same array as the step before when nothing has changed.
        """
        by_group = zip(self._groups, zip(*tables, strict=True), strict=True)
        parts = [group.gather(rows) for group, rows in by_group]
        if len(parts) == 1:
            return parts[0]
        if len(self._parts) != len(parts) or not all(map(operator.is_, parts, self._parts)):
            num_seqs, width = len(tables), max(part.shape[1] for part in parts)
            self._stacked = np.full((len(parts), num_seqs, width), NULL_BLOCK, dtype=np.int32)
            for number, part in enumerate(parts):
                self._stacked[number, :, : part.shape[1]] = part
            self._parts = parts
        return self._stacked


class _GroupTables:
    """Rows of block ids. A request's table only grows at its end, so new entries alone are copied.

    Copying 256 tables anew costs more than planning the step does. A table is known by being the
    same object: a request that got its blocks anew has another one. Where blocks are given back
    behind a window, that is just when a table grows: it is then copied whole.
    """

    def __init__(self, *, is_windowed: bool) -> None:
        self._is_windowed = is_windowed
        self._tables: list[array[int]] = []  # of the step before, and what was copied of them
        self._lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._rows: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)

    def gather(self, tables: Sequence[array[int]]) -> NDArray[np.int32]:
        ordered = list(tables)
        lengths = np.fromiter(map(len, ordered), np.int64, count=len(ordered))
        width = int(lengths.max())
        is_same = len(ordered) == len(self._tables) and all(
            map(operator.is_, ordered, self._tables)
        )
        if is_same and np.array_equal(lengths, self._lengths):
            return self._rows
        kept = np.arange(len(ordered)) if is_same else self._rows_before(ordered)
        rows = np.full((len(ordered), width), NULL_BLOCK, dtype=np.int32)
        copied = np.zeros_like(lengths)
        known = np.flatnonzero(kept >= 0)
        common = min(width, self._rows.shape[1])
        rows[known, :common] = self._rows[kept[known], :common]
        copied[known] = self._lengths[kept[known]]
        for row in np.flatnonzero(copied != lengths).tolist():
            start = 0 if self._is_windowed else int(copied[row])
            rows[row, start : lengths[row]] = ordered[row][start:]
        self._tables, self._lengths, self._rows = ordered, lengths, rows
        return rows

    def _rows_before(self, tables: list[array[int]]) -> NDArray[np.int64]:
        """Where each table was in the step before, -1 for one that was not there."""
        places = {id(table): row for row, table in enumerate(self._tables)}
        found = [places.get(id(table), -1) for table in tables]
        return np.array(found, dtype=np.int64)
