"""Random inputs and weights for any graph: what the tests of passes interpret graphs on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Value
from octavo.ir.ops.paged import KVState, kv_write
from octavo.ir.ops.quant import QUANT_SOURCED
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.ir.types import KVType, QuantType, TensorType, dim_at, tensor_type

DEFAULT_SIZES = {"T": 7, "S": 3, "B": 4, "R": 3}
BLOCK_SIZE = 4
_SMALL = 8  # bound of integers that index nothing we know of
_PASS_ON = ("cast", "reshape", "squeeze", "unsqueeze", "expand", "slice", "select")


def random_inputs(
    graph: Graph, sizes: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Tensor | KVState]:
    """One step's inputs by parameter name; equal seeds give equal inputs.

    Graphs with a KV state get a consistent batch (docs/architecture.md): ``S`` sequences share
    ``T`` new tokens, some with context already cached; what no token has written is NaN. Elsewhere
    ``positions`` count from 0. Integers that look something up stay within its rows.
    """
    bound = {**DEFAULT_SIZES, **(sizes or {})}
    generator = torch.Generator().manual_seed(seed)
    batch = _Batch.draw(graph, bound, generator)
    return {value.name: _input(graph, value, bound, batch, generator) for value in graph.inputs}


class RandomSource:
    """A WeightSource with random tensors for the keys that a graph reads.

    A tensor depends on seed, key and shape alone, so two stages of one model see the same weights.
    """

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        self.seed = seed
        self._types = {
            (node.op, node.attrs["key"]): tensor_type(node.output.type)
            for node in graph.weight_nodes
            if node.op in ("checkpoint", "buffer")
        }
        self._quant_types = {
            node.attrs["key"]: node.output.type
            for node in graph.weight_nodes
            if node.op in QUANT_SOURCED
        }

    def load(self, key: str) -> Tensor:
        """A tensor of the checkpoint. Raises KeyError for a key that the graph does not read."""
        return self._make("checkpoint", key)

    def buffer(self, key: str) -> Tensor:
        """A buffer of the model. Raises KeyError for a key that the graph does not read."""
        return self._make("buffer", key)

    def load_quantized(self, key: str) -> QuantTensor:
        """A quantised matrix. Raises KeyError for a key that the graph does not read."""
        declared = self._quant_types[key]
        assert isinstance(declared, QuantType), f"{key} is no quantised matrix"
        matrix = _tensor(TensorType("f32", declared.shape), {}, _SMALL, self._generator(key))
        return quantize(matrix, declared.scheme, search=False)

    def _make(self, op: str, key: str) -> Tensor:
        return _tensor(self._types[op, key], {}, _SMALL, self._generator(key))

    def _generator(self, key: str) -> torch.Generator:
        # crc32, not hash(): the same in every process.
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {key}".encode()))


@dataclass(frozen=True)
class _Batch:
    """The layout of a step over the paged cache, plain ints; ``tables`` are the sequences' blocks
    for each block group, of which no two share a block."""

    new: list[int]
    cached: list[int]
    tables: list[list[list[int]]]

    @classmethod
    def draw(
        cls, graph: Graph, sizes: Mapping[str, int], generator: torch.Generator
    ) -> _Batch | None:
        if not any(isinstance(value.type, KVType) for value in graph.inputs):
            return None
        num_seqs, num_tokens, limit = sizes["S"], sizes["T"], sizes["B"] * BLOCK_SIZE
        for value in graph.inputs:
            if value.name == "positions":
                limit = min(limit, _bound(graph, value, sizes, default=limit))
        new = [num_tokens // num_seqs + (s < num_tokens % num_seqs) for s in range(num_seqs)]
        if max(new) > limit:
            raise VerifyError(f"@{graph.name}: a sequence holds {limit}, not {max(new)} tokens")
        cached = [int(torch.randint(0, limit - n + 1, (), generator=generator)) for n in new]
        cached[0] = 0  # the first is a fresh prompt
        # Block 0 is the null block; the others are handed out in no order.
        num_groups = _num_groups(graph)
        num_blocks = num_groups * num_seqs * sizes["B"]
        ids = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        lengths = [n + c for n, c in zip(new, cached, strict=True)]
        tables = [
            [[ids.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
            for _ in range(num_groups)
        ]
        return cls(new, cached, tables)

    def positions(self) -> list[int]:
        return [c + i for n, c in zip(self.new, self.cached, strict=True) for i in range(n)]

    def slots(self, starts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Cache slots, for each group, of ``counts[s]`` tokens of each sequence from position
        ``starts[s]`` on."""
        return [
            [
                blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for blocks, start, count in zip(table, starts, counts, strict=True)
                for position in range(start, start + count)
            ]
            for table in self.tables
        ]

    def tensor(self, name: str, sizes: Mapping[str, int]) -> list[Any] | None:
        """The contents of one of the step's inputs, of whatever rank; None for a name that is
        none."""
        ends = [sum(self.new[: s + 1]) for s in range(len(self.new))]
        if name == "positions":
            return self.positions()
        if name == "slot_mapping":
            return self.slots(self.cached, self.new)
        if name == "block_table":
            width = sizes["B"]
            return [[row + [0] * (width - len(row)) for row in table] for table in self.tables]
        if name == "query_start":
            return [0, *ends]
        if name == "seq_lens":
            return [n + c for n, c in zip(self.new, self.cached, strict=True)]
        if name == "logit_rows":
            # Last tokens first: they are what a sampler asks for.
            return [(ends[r % len(ends)] - 1) % sizes["T"] for r in range(sizes["R"])]
        return None


def _input(
    graph: Graph,
    value: Value,
    sizes: Mapping[str, int],
    batch: _Batch | None,
    generator: torch.Generator,
) -> Tensor | KVState:
    if isinstance(value.type, KVType):
        assert batch is not None, "a graph with a KV state has a batch"
        return _cache(value.type, batch, sizes, generator)
    assert isinstance(value.type, TensorType), f"{value}: a parameter is a tensor or a state"
    known = batch.tensor(value.name, sizes) if batch else None
    if known is not None:
        return torch.tensor(known, dtype=value.type.torch_dtype).reshape(value.type.sizes(sizes))
    if value.name == "positions":
        shape = value.type.sizes(sizes)
        return torch.arange(shape[-1], dtype=value.type.torch_dtype).expand(shape)
    return _tensor(value.type, sizes, _bound(graph, value, sizes), generator)


def _cache(
    kv: KVType, batch: _Batch, sizes: Mapping[str, int], generator: torch.Generator
) -> KVState:
    """Caches with random context of the right lengths, and NaN wherever nothing was written."""
    num_blocks = len(batch.tables) * sizes["S"] * sizes["B"] + 1
    state = KVState.empty(kv, num_blocks, BLOCK_SIZE)
    # A slot is of one group, and finds context in the blocks of every other as well.
    written = batch.slots([0] * len(batch.cached), batch.cached)
    slots = torch.tensor([row for rows in written for row in rows], dtype=torch.int64)
    for index, slot in enumerate(kv.slots):
        dtype = torch.float32 if kv.scheme else state.keys[index].dtype
        k, v = (
            torch.randn(len(slots), slot.num_kv_heads, dim, generator=generator).to(dtype)
            for dim in (slot.head_dim, slot.v_head_dim)
        )
        kv_write.evaluate(state, k, v, slots, slot=index)
    return state


def _num_groups(graph: Graph) -> int:
    """As many block groups as ``block_table`` has rows for; one without such a dim."""
    for value in graph.inputs:
        if value.name == "block_table" and value.tensor.rank == 3:
            return dim_at(value.shape[0], {})
    return 1


def _bound(graph: Graph, value: Value, sizes: Mapping[str, int], default: int = _SMALL) -> int:
    """The number of rows of the smallest table that an integer input looks up."""
    bounds: list[int] = []
    pending = [value]
    while pending:
        current = pending.pop()
        for user in graph.users(current):
            if user.op == "embedding" and user.inputs[0] is current:
                bounds.append(dim_at(user.operand(1).shape[0], sizes))
            elif user.op == "gather_rows" and user.inputs[1] is current:
                bounds.append(dim_at(user.operand(0).shape[0], sizes))
            elif user.op in _PASS_ON:
                pending.extend(user.outputs)
    return min(bounds, default=default)


def _tensor(
    tensor: TensorType, sizes: Mapping[str, int], bound: int, generator: torch.Generator
) -> Tensor:
    shape, dtype = tensor.sizes(sizes), tensor.torch_dtype
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, bound, shape, generator=generator).to(dtype)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 2 and not sizes:
        drawn /= max(shape[1], 1) ** 0.5  # a matrix keeps the size of what it multiplies
    return drawn.to(dtype)
