"""Programs for cuda targets, run by Triton's interpreter, say what Hugging Face says.

Two sequences go through every kind of step: prompts together, a chunk beside a decode with tokens
that belong to nobody, a decode padded with a sequence that is none, a decode alone. The rule and
its tolerance are those of DESIGN section 8, see tests/hf_reference.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference
from model_zoo import tiny_model
from safetensors.torch import load_file
from state_dict_weights import StateDictWeights
from torch import Tensor

from octavo.codegen.generate import generate, kv_slots
from octavo.codegen.target import resolve_target
from octavo.frontend.trace import Imported
from octavo.ir.graph import Graph
from octavo.ir.manifest import num_groups
from octavo.ir.types import DTYPES, KVType
from octavo.passes.pipeline import run_pipeline
from octavo.runtime.kv_cache import KVCachePlan, KVFormat, allocate_kv_caches

pytest.importorskip("triton")

BLOCK_SIZE = 16
# Past the window of 8 of some models, and into a second block.
SEQUENCES = [
    [7, 42, 3, 3, 250, 17, 99, 128, 5, 64, 31, 9, 77, 18, 211, 84, 6, 140],
    [200, 1, 77, 13, 8, 190],
]
BLOCKS = [[5, 2], [3, 0]]
NUM_BLOCKS = 8  # of a block group; those of the next group follow
NAMES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2")


def _cases() -> list[Any]:
    """All in bf16 and f32; those that have a kernel of their own in one of them, the rest if asked.

    The interpreter takes seconds for a layer.
    """
    usual = {"llama-f32", "qwen2-bf16", "qwen3-bf16", "gemma2-bf16", "gpt2-bf16"}
    return [
        pytest.param(name, dtype, id=key, marks=() if key in usual else pytest.mark.slow)
        for name in NAMES
        for dtype in ("bf16", "f32")
        for key in [f"{name}-{dtype}"]
    ]


@dataclass
class Runner:
    """A program and what its sequences have seen so far; ``rows`` are the logits it gave."""

    program: Any
    num_groups: int
    done: list[int] = field(default_factory=lambda: [0] * len(SEQUENCES))
    rows: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in SEQUENCES])

    def step(self, *counts: int, spare_tokens: int = 0, spare_seqs: int = 0) -> None:
        """Take the next ``counts[s]`` tokens of each sequence, and padding of either kind."""
        ends = [d + n for d, n in zip(self.done, counts, strict=False)]
        tokens = [(s, p) for s, end in enumerate(ends) for p in range(self.done[s], end)]
        padding = [0] * (spare_tokens + spare_seqs)
        slots = [BLOCKS[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in tokens]
        starts = torch.tensor([0, *counts, *[1] * spare_seqs]).cumsum(0)
        tables = [*BLOCKS[: len(counts)], *[[0, 0]] * spare_seqs]
        logits = self.program(
            torch.tensor([SEQUENCES[s][p] for s, p in tokens] + padding),
            torch.tensor([p for _, p in tokens] + padding),
            self._of_groups(torch.tensor(slots + padding), BLOCK_SIZE),
            self._of_groups(torch.tensor(tables, dtype=torch.int32), 1),
            starts.int(),
            torch.tensor([*ends, *[1] * spare_seqs], dtype=torch.int32),
            torch.arange(len(tokens) + spare_seqs),
        )
        for (s, _), row in zip(tokens, logits, strict=False):
            self.rows[s].append(row.clone())
        self.done[: len(ends)] = ends

    def _of_groups(self, ids: Tensor, block_size: int) -> Tensor:
        """An input as each group has it: in blocks of its own, but for the null block."""
        if self.num_groups == 1:
            return ids
        shifts = [group * NUM_BLOCKS * block_size for group in range(self.num_groups)]
        return torch.stack([torch.where(ids < block_size, ids, ids + shift) for shift in shifts])


def _program(graph: Graph, model: Any, directory: Path) -> Any:
    """The program for sm_90, with weights; caches and buffers are full of NaN."""
    generate(graph, resolve_target("cuda:sm_90"), directory, StateDictWeights(model))
    weights: dict[str, Tensor] = {}
    for shard in (directory / "weights").glob("*.safetensors"):
        weights.update(load_file(shard))
    sys.path.insert(0, str(directory.parent))
    try:
        module = importlib.import_module(f"{directory.name}.program")
    finally:
        sys.path.remove(str(directory.parent))
    kv = next(value.type for value in graph.inputs if isinstance(value.type, KVType))
    slots = kv_slots(graph)
    plan = KVCachePlan(num_groups(slots) * NUM_BLOCKS, BLOCK_SIZE, 0)
    caches = allocate_kv_caches(slots, plan, KVFormat(DTYPES[kv.dtype]), torch.device("cpu"))
    for cache in (cache for pair in caches for cache in pair):
        cache.fill_(torch.nan)
    program = module.Program(weights, caches, max_num_tokens=32, max_num_seqs=32)
    for memory in program.memory:
        memory.fill_(0xFF)
    return program


@pytest.mark.parametrize(("name", "dtype"), _cases())
def test_every_kind_of_step(
    traced: Callable[[str, Any], Imported], name: str, dtype: str, tmp_path: Path
) -> None:
    torch_dtype = DTYPES[dtype]
    model = tiny_model(name, seed=0, dtype=torch_dtype)
    model.save_pretrained(tmp_path / "checkpoint")
    reference = HFReference(tmp_path / "checkpoint", torch_dtype, SEQUENCES, num_new_tokens=1)
    imported = traced(name, torch_dtype)
    run_pipeline(imported.graph, max_position=imported.max_position, target="cuda")
    program = _program(imported.graph, model, tmp_path / f"{name}_{dtype}")
    runner = Runner(program, num_groups(kv_slots(imported.graph)))
    runner.step(14, 4)
    # More tokens than sequences: as many would be a decode (docs/cuda.md).
    runner.step(2, 1, spare_tokens=2)
    runner.step(1, 1, spare_seqs=1)
    runner.step(1)
    for sequence, rows in zip(SEQUENCES, runner.rows, strict=True):
        reference.check_rows(sequence, torch.stack(rows), f"{name}, {len(sequence)} tokens")
