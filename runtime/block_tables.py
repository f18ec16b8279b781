"""The block tables of a step as one array, kept and extended from step to step."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.block_manager import NULL_BLOCK
from octavo.runtime.scheduler import ScheduledSequence

_FIRST_SIZE = 16


class _Place(NamedTuple):
    """Where a request's table is kept: its row, the table itself, how many entries are copied."""

    row: int
    table: array[int]
    num_copied: int


class BlockTables:
    """A row for each request. A request's table grows at its end, so only new entries are copied.

    Copying 256 tables anew costs more than planning the step does.
    """

    def __init__(self) -> None:
        self._rows = np.full((_FIRST_SIZE, _FIRST_SIZE), NULL_BLOCK, dtype=np.int32)
        self._free_rows = list(range(_FIRST_SIZE))
        self._places: dict[str, _Place] = {}

    def gather(self, sequences: tuple[ScheduledSequence, ...]) -> NDArray[np.int32]:
        """A table ``[S, B]`` as wide as the longest needs, padded with the null block."""
        tables = [sequence.block_ids for sequence in sequences]
        lengths = list(map(len, tables))
        width = max(lengths)
        self._make_room(sequences, width)
        places, rows = self._places, []
        for sequence, table, length in zip(sequences, tables, lengths, strict=True):
            request_id = sequence.request.request_id
            place = places.get(request_id)
            if place is None or place.num_copied != length or place.table is not table:
                place = places[request_id] = self._copy(table, place)
            rows.append(place.row)
        gathered: NDArray[np.int32] = self._rows[:, :width].take(rows, axis=0)
        return gathered

    def _copy(self, table: array[int], place: _Place | None) -> _Place:
        if place is not None and place.table is table:
            row, start = place.row, place.num_copied
        else:
            row, start = self._free_rows.pop() if place is None else place.row, 0
            self._rows[row] = NULL_BLOCK
        self._rows[row, start : len(table)] = table[start:]
        return _Place(row, table, len(table))

    def _make_room(self, sequences: tuple[ScheduledSequence, ...], width: int) -> None:
        num_rows, old_width = self._rows.shape
        # Twice the step's rows, so that the ended are looked for once in many steps.
        new_rows = max(num_rows, 2 * len(sequences))
        new_width = old_width if width <= old_width else max(width, 2 * old_width)
        if (new_rows, new_width) != (num_rows, old_width):
            margins = ((0, new_rows - num_rows), (0, new_width - old_width))
            self._rows = np.pad(self._rows, margins, constant_values=NULL_BLOCK)
            self._free_rows += range(num_rows, new_rows)
        if len(self._free_rows) < len(sequences):
            self._forget_all_but({s.request.request_id for s in sequences})

    def _forget_all_but(self, request_ids: set[str]) -> None:
        """Take the rows of requests that do not run in this step: most of them have ended."""
        gone = [request_id for request_id in self._places if request_id not in request_ids]
        self._free_rows += [self._places.pop(request_id).row for request_id in gone]
