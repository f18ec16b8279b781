"""The inputs of a step on a GPU: packed on the host, copied at once, read at fixed places.

    device memory:   | sampled tokens | ids | positions | ... | block table, if it changed |
                       stay             one copy a step out of pinned memory --------------

A CUDA graph reads what lies at the addresses that it was captured with. Those of a padded size are
always the same: the fields of a size follow each other with no room for larger ones between them,
so that a small step copies a few hundred bytes. The block table has a place of its own, to which
the packed rows are copied on the device. With G block groups it has G tables in it, and
``slot_mapping`` is ``[G, T]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.batch import Batch
from octavo.runtime.pinned import PinnedBuffer

_ALIGNMENT = 16
_BYTES = torch.uint8


class StepSize(NamedTuple):
    """T, S and R of a step; T == S means one token a sequence."""

    num_tokens: int
    num_seqs: int
    num_rows: int


class SampleColumns(Protocol):
    """What R rows are sampled by, a column each: see octavo.runtime.device_sampler."""

    @property
    def temperature(self) -> NDArray[Any]: ...
    @property
    def top_k(self) -> NDArray[Any]: ...
    @property
    def top_p(self) -> NDArray[Any]: ...
    @property
    def min_p(self) -> NDArray[Any]: ...
    @property
    def seed(self) -> NDArray[Any]: ...
    @property
    def stream(self) -> NDArray[Any]: ...
    @property
    def position(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class SampleTensors:
    """SampleColumns on the device."""

    temperature: Tensor  # f32[R]
    top_k: Tensor  # i32[R]
    top_p: Tensor  # f32[R]
    min_p: Tensor  # f32[R]
    seed: Tensor  # i64[R]
    stream: Tensor  # i64[R]
    position: Tensor  # i64[R]


@dataclass(frozen=True)
class StepTensors:
    """The inputs of one size on the device.

    ``program`` are the seven inputs of a program. Its ids are written by ``take_ids``, which picks
    each from the sampled tokens and the packed ids.
    """

    size: StepSize
    program: tuple[Tensor, ...]
    sampling: SampleTensors
    candidates: Tensor  # i64: the sampled tokens, then the packed ids
    sources: Tensor  # i64[T], places in `candidates`

    def take_ids(self) -> None:
        """One kernel: ids of tokens that the step before sampled come from the device."""
        torch.index_select(self.candidates, 0, self.sources, out=self.program[0])


# Name, dtype and extent of each packed field. The ids come first: `sources` counts on it.
_FIELDS: tuple[tuple[str, np.dtype[Any], str], ...] = (
    ("ids", np.dtype(np.int64), "T"),
    ("positions", np.dtype(np.int64), "T"),
    ("slot_mapping", np.dtype(np.int64), "G*T"),
    ("sources", np.dtype(np.int64), "T"),
    ("logit_rows", np.dtype(np.int64), "R"),
    ("seed", np.dtype(np.int64), "R"),
    ("stream", np.dtype(np.int64), "R"),
    ("position", np.dtype(np.int64), "R"),
    ("temperature", np.dtype(np.float32), "R"),
    ("top_k", np.dtype(np.int32), "R"),
    ("top_p", np.dtype(np.float32), "R"),
    ("min_p", np.dtype(np.float32), "R"),
    ("query_start", np.dtype(np.int32), "S+1"),
    ("seq_lens", np.dtype(np.int32), "S"),
)
# A padded row of logits is greedy: the cheapest way to a token that nobody reads.
_NEUTRAL = {"top_p": 1.0}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stream", "position")


def table_width(max_model_len: int, block_size: int) -> int:
    """Columns of the block table, so that rows are 16-byte aligned."""
    return -(-max_model_len // (block_size * 4)) * 4


def input_bytes(max_num_tokens: int, max_num_seqs: int, width: int, num_groups: int = 1) -> int:
    """Bytes on the device; one of the two pinned buffers has less."""
    largest = _layout(StepSize(max_num_tokens, max_num_seqs, max_num_seqs), num_groups)
    tables = num_groups * max_num_seqs * width * 4
    return max_num_seqs * 8 + largest.num_bytes + 2 * tables + max_num_tokens * 8


class _Layout(NamedTuple):
    """Where the fields of a size lie: byte offset and extent of each."""

    places: dict[str, tuple[int, int]]
    num_bytes: int


@lru_cache(maxsize=256)
def _layout(size: StepSize, num_groups: int) -> _Layout:
    extents = {
        "T": size.num_tokens,
        "G*T": num_groups * size.num_tokens,
        "S": size.num_seqs,
        "S+1": size.num_seqs + 1,
        "R": size.num_rows,
    }
    places, offset = {}, 0
    for name, dtype, symbol in _FIELDS:
        places[name] = (offset, extents[symbol])
        offset += -(-extents[symbol] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return _Layout(places, offset)


class _Pinned:
    """Host memory for one step's inputs, and the event after which it may be written again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.buffer = PinnedBuffer(num_bytes, device)
        self.array: NDArray[np.uint8] = self.buffer.host.numpy()
        is_cuda = device.type == "cuda"
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the last copy from here is done: nearly always it is long since."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark_copied(self) -> None:
        if self._copied is not None:
            self._copied.record()


class StepInputs:
    """The buffers. Two are pinned: one is written while the copy from the other may still run."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        width: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        largest = _layout(StepSize(max_num_tokens, max_num_seqs, max_num_seqs), num_groups)
        self.num_groups = num_groups
        self._table_bytes = num_groups * max_num_seqs * width * 4
        num_bytes = largest.num_bytes + self._table_bytes
        self._start = -(-max_num_seqs * 8 // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(self._start + num_bytes, dtype=_BYTES, device=device)
        self._packed = self._memory[self._start :]
        self._pinned = [_Pinned(num_bytes, device) for _ in range(2)]
        self._ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        tables = (num_groups, max_num_seqs, width)
        self._tables = torch.zeros(tables, dtype=torch.int32, device=device)
        self._last_table: NDArray[np.int32] | None = None
        self.tokens = self._memory[: max_num_seqs * 8].view(torch.int64)

    def tensors(self, size: StepSize) -> StepTensors:
        """Views of the device memory for a size: the same addresses every time."""
        layout = _layout(size, self.num_groups)
        views: dict[str, Tensor] = {}
        for name, dtype, _ in _FIELDS:
            offset, extent = layout.places[name]
            flat = self._packed[offset : offset + extent * dtype.itemsize]
            views[name] = flat.view(getattr(torch, dtype.name))
        slot_mapping = views["slot_mapping"].view(self.num_groups, size.num_tokens)
        tables = self._tables[:, : size.num_seqs]
        is_single = self.num_groups == 1
        return StepTensors(
            size=size,
            program=(
                self._ids[: size.num_tokens],
                views["positions"],
                slot_mapping[0] if is_single else slot_mapping,
                tables[0] if is_single else tables,
                views["query_start"],
                views["seq_lens"],
                views["logit_rows"],
            ),
            sampling=SampleTensors(**{name: views[name] for name in _SAMPLING}),
            candidates=self._memory[: self._start + size.num_tokens * 8].view(torch.int64),
            sources=views["sources"],
        )

    def copy_in(self, batch: Batch, sampling: SampleColumns, size: StepSize) -> None:
        """Start the copy of a step's inputs, padded to ``size``. It waits for nothing on the GPU.

        Padding writes to the null block and belongs to nobody: see docs/cuda.md.
        """
        layout = _layout(size, self.num_groups)
        pinned = self._pinned[0]
        self._pinned.reverse()
        pinned.wait()
        self._fill(_fields(pinned.array, layout), batch, sampling, size)
        num_bytes = layout.num_bytes
        is_table_new = not self._has_table(batch.block_table)
        if is_table_new:
            num_bytes += batch.block_table.nbytes
            room = pinned.array[layout.num_bytes : num_bytes].view(np.int32)
            room.reshape(batch.block_table.shape)[:] = batch.block_table
        pinned.buffer.put_into(self._packed, num_bytes)
        pinned.mark_copied()
        if is_table_new:
            num_seqs, width = batch.block_table.shape[-2:]
            rows = self._packed[layout.num_bytes : num_bytes].view(torch.int32)
            self._tables[:, :num_seqs, :width].copy_(rows.view(-1, num_seqs, width))
            self._last_table = batch.block_table

    def _has_table(self, table: NDArray[np.int32]) -> bool:
        """Whether the device has these rows: nobody started, ended or grew by a block."""
        last = self._last_table
        return last is table or (last is not None and np.array_equal(last, table))

    def _fill(
        self, fields: dict[str, NDArray[Any]], batch: Batch, sampling: SampleColumns, size: StepSize
    ) -> None:
        num_tokens, num_seqs = len(batch.ids), len(batch.seq_lens)
        for name in ("ids", "positions", "logit_rows"):
            _pad(fields[name], getattr(batch, name), 0)
        slots = fields["slot_mapping"].reshape(self.num_groups, size.num_tokens)
        slots[:, :num_tokens] = batch.slot_mapping
        slots[:, num_tokens:] = 0
        for name in _SAMPLING:
            _pad(fields[name], getattr(sampling, name), _NEUTRAL.get(name, 0))
        _pad(fields["seq_lens"], batch.seq_lens, 1)
        query_start = fields["query_start"]
        query_start[: num_seqs + 1] = batch.query_start
        is_decode = size.num_tokens == size.num_seqs
        query_start[num_seqs + 1 :] = (
            np.arange(num_seqs + 1, size.num_seqs + 1) if is_decode else num_tokens
        )
        sources = fields["sources"]
        first_id = self._start // 8
        sources[:] = np.arange(first_id, first_id + size.num_tokens)
        if batch.source_rows is not None:
            np.copyto(sources[:num_tokens], batch.source_rows, where=batch.source_rows >= 0)


def _fields(memory: NDArray[np.uint8], layout: _Layout) -> dict[str, NDArray[Any]]:
    return {
        name: memory[offset : offset + extent * dtype.itemsize].view(dtype)
        for (name, dtype, _), (offset, extent) in zip(_FIELDS, layout.places.values(), strict=True)
    }


def _pad(field: NDArray[Any], values: NDArray[Any], padding: float) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding
