"""The logits of a stage of a model, by the interpreter, before and after attention is paged.

Once it is, both sequences share a step and are fed in two chunks: the second reads what the first
one cached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ir.graph import Graph, Value
from octavo.ir.interpret import WeightSource, interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.types import KVType
from octavo.ir.weight_cache import WeightCache

BLOCK_SIZE = 4
# Past the window of 8, and across blocks; the second sequence ends in the middle of a block.
SEQUENCES = [[7, 42, 3, 3, 250, 17, 99, 128, 5, 64, 31], [200, 1, 77, 13, 8, 190]]
BLOCKS = [[5, 2, 7], [3, 6]]
NUM_BLOCKS = 8  # of a block group; those of the next group follow
CHUNKS = [(7, 5), (4, 1)]


def stage_logits(graph: Graph, weights: WeightSource | WeightCache) -> list[Tensor]:
    """Logits ``[T, V]`` of each of SEQUENCES."""
    if any(isinstance(value.type, KVType) for value in graph.inputs):
        return logits_in_chunks(graph, weights)
    return [logits_of_one(graph, ids, weights) for ids in SEQUENCES]


def logits_of_one(graph: Graph, ids: list[int], weights: WeightSource | WeightCache) -> Tensor:
    """Logits ``[T, V]`` of a sequence alone, by a graph that is not paged."""
    given = {"ids": torch.tensor(ids), "positions": torch.arange(len(ids))}
    inputs = {v.name: given[v.name].expand([1] * (v.tensor.rank - 1) + [-1]) for v in graph.inputs}
    (logits,) = interpret(graph, inputs, weights)
    assert isinstance(logits, Tensor)
    return logits.reshape(len(ids), -1)


def logits_in_chunks(graph: Graph, weights: WeightSource | WeightCache) -> list[Tensor]:
    """Logits of each sequence by a paged graph, in steps that hold a chunk of every sequence."""
    kv_type = next(value.type for value in graph.inputs if isinstance(value.type, KVType))
    num_groups = next((v.shape[0] for v in graph.inputs if _is_grouped(v)), 1)
    kv = KVState.empty(kv_type, num_blocks=num_groups * NUM_BLOCKS, block_size=BLOCK_SIZE)
    done, found = [0] * len(SEQUENCES), [[] for _ in SEQUENCES]
    for chunk in CHUNKS:
        step = _step(done, chunk)
        if num_groups > 1:
            shifts = torch.arange(num_groups) * NUM_BLOCKS
            step["slot_mapping"] = step["slot_mapping"] + shifts[:, None] * BLOCK_SIZE
            step["block_table"] = (step["block_table"] + shifts[:, None, None]).int()
        inputs = {v.name: kv if v.name == "kv" else step[v.name] for v in graph.inputs}
        logits = interpret(graph, inputs, weights)[0]
        assert isinstance(logits, Tensor)
        for index, rows in enumerate(logits.split(list(chunk))):
            found[index].append(rows)
        done = [a + b for a, b in zip(done, chunk, strict=True)]
    return [torch.cat(rows) for rows in found]


def _is_grouped(value: Value) -> bool:
    return value.name == "block_table" and value.tensor.rank == 3


def _step(done: list[int], chunk: tuple[int, ...]) -> dict[str, Tensor]:
    """The inputs of a step that takes the next ``chunk[s]`` tokens of each sequence."""
    ticks = [range(d, d + n) for d, n in zip(done, chunk, strict=True)]
    tokens = [(s, position) for s, span in enumerate(ticks) for position in span]
    widest = max(map(len, BLOCKS))
    step = {
        "ids": [SEQUENCES[s][p] for s, p in tokens],
        "positions": [p for _, p in tokens],
        "slot_mapping": [
            BLOCKS[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in tokens
        ],
        "logit_rows": list(range(len(tokens))),
    }
    return {name: torch.tensor(values) for name, values in step.items()} | {
        "block_table": torch.tensor(
            [blocks + [0] * (widest - len(blocks)) for blocks in BLOCKS], dtype=torch.int32
        ),
        "query_start": torch.tensor([0, *chunk], dtype=torch.int32).cumsum(0).int(),
        "seq_lens": torch.tensor([span.stop for span in ticks], dtype=torch.int32),
    }
