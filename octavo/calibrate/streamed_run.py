"""A graph run node by node for a whole text, stopping wherever somebody wants to look.

Sequences go through in chunks, a node for all chunks before the next stop: so a weight is loaded
once, can be replaced by what it is quantised to before anything reads it, and memory is that of
what is live between two nodes, for all tokens, and of one layer's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo.calibrate.sequences import free_slot, hold_slot, step_inputs
from octavo.ir.bind import bind_inputs
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.interpret import Observer, Result, last_uses, run_node
from octavo.ir.ops.paged import KVState
from octavo.ir.types import KVType
from octavo.ir.weight_cache import WeightCache, WeightSource

_CHUNK_TOKENS = 2048


class StreamedRun:
    """A run of a graph after attention is paged. Chunks are ``sequences`` laid end to end, up to
    2,048 tokens or one sequence. ``observe`` sees each node with its results, chunk by chunk."""

    def __init__(
        self,
        graph: Graph,
        weights: WeightSource | WeightCache,
        sequences: Sequence[Sequence[int]],
        *,
        observe: Observer | None = None,
    ) -> None:
        self.graph = graph
        self._observe = observe
        self.cache = weights if isinstance(weights, WeightCache) else WeightCache(graph, weights)
        self._chunks: list[dict[Value, Result]] = []
        self._sizes: list[dict[str, int]] = []
        for chunk in _chunks(sequences):
            inputs = step_inputs(graph, chunk)
            self._sizes.append(bind_inputs(graph, inputs))
            self._chunks.append({value: inputs[value.name] for value in graph.inputs})
        self._replaced: dict[Value, Tensor] = {}
        self._dying = last_uses(graph)
        self._last_of_slot = {
            node.attrs["slot"]: node for node in graph.nodes if "slot" in node.attrs
        }
        self._done = 0

    def advance(self, stop: Node | None) -> None:
        """Run up to a node, which is left to run; up to the end for None."""
        end = len(self.graph.nodes) if stop is None else self.graph.nodes.index(stop)
        nodes = self.graph.nodes[self._done : end]
        with torch.no_grad():
            for values, sizes in zip(self._chunks, self._sizes, strict=True):
                for node in nodes:
                    self._run(node, values, sizes)
        self._done = end
        to_come = {value for node in self.graph.nodes[end:] for value in node.operands}
        self._replaced = {v: tensor for v, tensor in self._replaced.items() if v in to_come}

    def values(self, value: Value) -> Iterator[Tensor]:
        """What a live value is, chunk by chunk."""
        for values in self._chunks:
            result = values[value]
            assert isinstance(result, Tensor), f"{value} is no tensor"
            yield result

    def weight(self, weight: Value) -> Tensor:
        """What a weight is that is no quantised matrix."""
        tensor = self.cache.get(weight)
        assert isinstance(tensor, Tensor), f"{weight} is quantised already"
        return tensor

    def replace(self, weight: Value, tensor: Tensor) -> None:
        """Let the nodes to come read this in the place of a weight."""
        self._replaced[weight] = tensor

    def _run(self, node: Node, values: dict[Value, Result], sizes: dict[str, int]) -> None:
        states = [values[v] for v in node.operands if isinstance(v.type, KVType)]
        slot = node.attrs.get("slot")
        for state in states:
            assert isinstance(state, KVState), "a KV value is a KV state"
            if slot is not None:
                hold_slot(state, slot)
        results = run_node(node, [self._operand(v, values) for v in node.inputs], sizes)
        values.update(zip(node.outputs, results, strict=True))
        if self._observe is not None:
            self._observe(node, results)
        for state in states:
            if slot is not None and self._last_of_slot[slot] is node and isinstance(state, KVState):
                free_slot(state, slot)
        for value in self._dying.get(node, ()):
            del values[value]

    def _operand(self, value: Value | None, values: dict[Value, Result]) -> Result | None:
        if value is None or not value.is_weight:
            return None if value is None else values[value]
        replaced = self._replaced.get(value)
        return self.cache.get(value) if replaced is None else replaced


def _chunks(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    chunks: list[list[Sequence[int]]] = []
    size = 0
    for ids in sequences:
        if not chunks or size + len(ids) > _CHUNK_TOKENS:
            chunks.append([])
            size = 0
        chunks[-1].append(ids)
        size += len(ids)
    return chunks
