"""Batches of a step spelled out: which sequences, how much of each is cached, how much is new."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from octavo.ir.graph import Graph
from octavo.ir.ops.paged import KVState
from octavo.ir.types import DTYPES, KVType

BLOCK_SIZE = 4


def batch(
    graph: Graph,
    sequences: Sequence[tuple[int, int]],
    *,
    is_in_a_row: bool = False,
    rows: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The inputs of a step for sequences given as (tokens cached, tokens new).

    Blocks of 4 tokens are handed out in random order, or one after another with ``is_in_a_row``.
    What no token has written is NaN. ``rows`` are the tokens whose logits are wanted, by default
    each sequence's last.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(cached + new) // BLOCK_SIZE) for cached, new in sequences]
    total = sum(counts)
    order = range(total) if is_in_a_row else torch.randperm(total, generator=generator).tolist()
    ids = [block + 1 for block in order]  # block 0 is the null block
    blocks = [[ids.pop(0) for _ in range(count)] for count in counts]
    slots = [
        [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(cached + new)]
        for table, (cached, new) in zip(blocks, sequences, strict=True)
    ]
    new_positions = [p for cached, new in sequences for p in range(cached, cached + new)]
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)
    width = max(counts, default=0)
    tables = [table + [0] * (width - len(table)) for table in blocks]
    last = [end - 1 for start, end in pairwise(starts) if end > start]
    embeddings = (node for node in graph.nodes if node.op.startswith("embedding"))
    vocab = next(node for node in embeddings if "ids" in str(node.inputs[0]))
    num_ids = vocab.operand(1).shape[0]
    return {
        "ids": torch.randint(0, num_ids, (len(new_positions),), generator=generator),
        "positions": torch.tensor(new_positions, dtype=torch.int64),
        "slot_mapping": torch.tensor(
            [s for seq, (cached, _) in zip(slots, sequences, strict=True) for s in seq[cached:]],
            dtype=torch.int64,
        ),
        "block_table": torch.tensor(tables, dtype=torch.int32).reshape(len(tables), width),
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor([c + n for c, n in sequences], dtype=torch.int32),
        "logit_rows": torch.tensor(last if rows is None else list(rows), dtype=torch.int64),
        "kv": _cache(graph, total + 1, slots, [c for c, _ in sequences], generator),
    }


def _cache(
    graph: Graph,
    num_blocks: int,
    slots: Sequence[Sequence[int]],
    cached: Sequence[int],
    generator: torch.Generator,
) -> KVState:
    kv = next(value.type for value in graph.inputs if isinstance(value.type, KVType))
    state = KVState.empty(kv, num_blocks, BLOCK_SIZE)
    written = [s for seq, count in zip(slots, cached, strict=True) for s in seq[:count]]
    for tensor in (*state.keys, *state.values):
        rows = tensor.flatten(0, 1)
        drawn = torch.randn(len(written), *rows.shape[1:], generator=generator)
        rows[torch.tensor(written, dtype=torch.int64)] = drawn.to(DTYPES[kv.dtype])
    return state
