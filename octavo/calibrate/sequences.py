"""Text as the sequences that a graph is run with: windows of tokens, and the inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.interpret import Result
from octavo.ir.ops.paged import KVState
from octavo.ir.types import KVType

BLOCK_SIZE = 16


@dataclass(frozen=True)
class CalibrationOptions:
    """How much of a text is used: so many samples of so many tokens, spread over all of it."""

    num_samples: int = 128
    length: int = 512


def read_text(option: str, path: Path) -> str:
    """A text that an option names. Raises OctavoError for one that cannot be read as UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"{option} {path} cannot be read as UTF-8 text: {error}") from None


def sample_windows(ids: Sequence[int], options: CalibrationOptions) -> list[list[int]]:
    """Windows at even distances that do not overlap; as many as there are, if the text is short.

    Raises OctavoError for a text that does not fill one window.
    """
    count = min(options.num_samples, len(ids) // options.length)
    if count < 1:
        raise OctavoError(
            f"the calibration text has {len(ids)} tokens, expected at least one sample of"
            f" {options.length}; give a longer text, or shorter samples with --calibration-length"
        )
    room = len(ids) - count * options.length
    starts = [k * options.length + (room * k) // max(1, count - 1) for k in range(count)]
    return [list(ids[start : start + options.length]) for start in starts]


def step_inputs(graph: Graph, sequences: Sequence[Sequence[int]]) -> dict[str, Result]:
    """What a graph takes for whole sequences laid end to end, with logits of every token.

    The storage of the caches is empty; ``hold_slot`` gives it room.
    """
    lengths = [len(ids) for ids in sequences]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    slots, block = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.arange(block, block + count)
        slots.append(block * BLOCK_SIZE + torch.arange(length))
        block += count
    groups = _num_groups(graph)
    mapping = torch.cat(slots)
    if groups > 1:  # each in blocks of its own, as layers of several groups may share caches
        table = torch.stack([table + group * block for group in range(groups)])
        mapping = torch.stack([mapping + group * block * BLOCK_SIZE for group in range(groups)])
    given: dict[str, Result] = {
        "ids": torch.tensor([token for ids in sequences for token in ids]),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "slot_mapping": mapping,
        "block_table": table,
        "query_start": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "logit_rows": torch.arange(sum(lengths)),
    }
    inputs: dict[str, Result] = {}
    for value in graph.inputs:
        if isinstance(value.type, KVType):
            inputs[value.name] = _empty_caches(value.type, groups * block)
        else:
            inputs[value.name] = given[value.name]
    return inputs


def _num_groups(graph: Graph) -> int:
    """Groups of layers with block tables of their own (passes/block_groups.py); one has no
    dimension in the inputs."""
    for value in graph.inputs:
        if value.name == "slot_mapping" and isinstance(value.shape[0], int):
            return value.shape[0]
    return 1


def _empty_caches(kv: KVType, num_blocks: int) -> KVState:
    """The caches of ``KVState.empty``, and scales if tokens have them, without their memory."""
    with torch.device("meta"):
        shapes = KVState.empty(kv, num_blocks, BLOCK_SIZE)
    sides = (shapes.keys, shapes.values, shapes.key_scales, shapes.value_scales)
    return KVState(*(tuple(_without_memory(tensor) for tensor in side) for side in sides))


def _without_memory(shape: Tensor) -> Tensor:
    tensor = torch.empty_like(shape, device="cpu")
    tensor.untyped_storage().resize_(0)
    return tensor


def hold_slot(state: KVState, slot: int) -> None:
    """Give a slot's caches memory, if they have none: NaN, as nothing was written yet, or zeros
    where integers cannot say that."""
    for cache in _of_slot(state, slot):
        if not cache.untyped_storage().nbytes():
            cache.untyped_storage().resize_(cache.numel() * cache.itemsize)
            cache.fill_(torch.nan if cache.is_floating_point() else 0)


def free_slot(state: KVState, slot: int) -> None:
    """Take the memory of a slot's caches away: no attention reads them any more."""
    for cache in _of_slot(state, slot):
        cache.untyped_storage().resize_(0)


def _of_slot(state: KVState, slot: int) -> list[Tensor]:
    sides = (state.keys, state.values, state.key_scales, state.value_scales)
    return [side[slot] for side in sides if side]
