"""Every stage of every tiny model verifies, round-trips through text, and gives the same logits.

The logits are those of the imported graph, one sequence at a time. Once attention is paged, both
sequences share a step and are fed in two chunks: the second reads what the first one cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from octavo.frontend.trace import import_model
from octavo.ir.equal import structurally_equal
from octavo.ir.graph import Graph
from octavo.ir.interpret import WeightSource, interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph
from octavo.ir.random_inputs import RandomSource
from octavo.ir.types import DTYPES, KVType
from octavo.passes.pipeline import PIPELINE, Stage, run_pipeline
from tests.model_zoo import MORE, TINY
from tests.tolerances import assert_same

BLOCK_SIZE = 4
# Past the window of 8, and across blocks; the second sequence ends in the middle of a block.
SEQUENCES = [[7, 42, 3, 3, 250, 17, 99, 128, 5, 64, 31], [200, 1, 77, 13, 8, 190]]
BLOCKS = [[5, 2, 7], [3, 6]]
CHUNKS = [(7, 5), (4, 1)]


@dataclass(frozen=True)
class _Weights:
    """Random checkpoint tensors; the model's own buffers."""

    random: RandomSource
    buffers: Mapping[str, Tensor]

    def load(self, key: str) -> Tensor:
        """A random tensor for a checkpoint key."""
        return self.random.load(key)

    def buffer(self, key: str) -> Tensor:
        """What the model computed when it was built."""
        return self.buffers[key]


# The architectures that have to come out right are tested in both dtypes.
MODELS = [*((name, "f32") for name in (*TINY, *MORE)), *((name, "bf16") for name in TINY)]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_every_stage_gives_the_same_logits(name: str, dtype: str) -> None:
    imported = import_model({**TINY, **MORE}[name](), DTYPES[dtype])
    graph = imported.graph
    weights = _Weights(RandomSource(graph), imported.buffers)
    want = [_logits_of_one(graph, ids, weights) for ids in SEQUENCES]
    stages = run_pipeline(
        graph,
        max_position=imported.max_position,
        on_stage=partial(_check_stage, graph, weights, want),
    )
    assert [stage.name for stage in stages] == ["import", *PIPELINE]
    assert not graph.find("attention"), "attention was not paged"


def _check_stage(graph: Graph, weights: WeightSource, want: list[Tensor], stage: Stage) -> None:
    assert structurally_equal(parse_graph(stage.text), graph) is None
    if any(isinstance(value.type, KVType) for value in graph.inputs):
        got = _logits_in_chunks(graph, weights)
    else:
        got = [_logits_of_one(graph, ids, weights) for ids in SEQUENCES]
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        what = f"stage {stage.number} {stage.name}, sequence {index}"
        assert_same(one.to(other.dtype), other, what)


def _logits_of_one(graph: Graph, ids: list[int], weights: WeightSource) -> Tensor:
    """Logits ``[T, V]`` of a sequence alone, by a graph that is not paged."""
    given = {"ids": torch.tensor(ids), "positions": torch.arange(len(ids))}
    inputs = {v.name: given[v.name].expand([1] * (v.tensor.rank - 1) + [-1]) for v in graph.inputs}
    (logits,) = interpret(graph, inputs, weights)
    assert isinstance(logits, Tensor)
    return logits.reshape(len(ids), -1)


def _logits_in_chunks(graph: Graph, weights: WeightSource) -> list[Tensor]:
    """Logits of each sequence by a paged graph, in steps that hold a chunk of every sequence."""
    kv_type = next(value.type for value in graph.inputs if isinstance(value.type, KVType))
    kv = KVState.empty(kv_type, num_blocks=8, block_size=BLOCK_SIZE)
    done, found = [0] * len(SEQUENCES), [[] for _ in SEQUENCES]
    for chunk in CHUNKS:
        step = _step(done, chunk)
        inputs = {v.name: kv if v.name == "kv" else step[v.name] for v in graph.inputs}
        logits = interpret(graph, inputs, weights)[0]
        assert isinstance(logits, Tensor)
        for index, rows in enumerate(logits.split(list(chunk))):
            found[index].append(rows)
        done = [a + b for a, b in zip(done, chunk, strict=True)]
    return [torch.cat(rows) for rows in found]


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
