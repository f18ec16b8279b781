"""Programs for tests: generated into a directory, imported, and run on a batch of the IR's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.codegen.generate import STEP_INPUTS, Generated, generate
from octavo.codegen.target import resolve_target
from octavo.ir.graph import Graph
from octavo.ir.interpret import interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.random_inputs import RandomSource


class Compiled:
    """A graph and its program; ``directory`` has to have a name that no other test uses."""

    def __init__(self, graph: Graph, directory: Path, target: str = "cpu") -> None:
        self.graph = graph
        self.source = RandomSource(graph)
        self.generated: Generated = generate(graph, resolve_target(target), directory, self.source)
        self.weights: dict[str, Tensor] = {}
        for shard in sorted((directory / "weights").glob("*.safetensors")):
            self.weights.update(load_file(shard))
        self.text = (directory / "program.py").read_text("utf-8")
        self.module = _imported(directory)

    def program(self, kv: KVState, **capacity: int) -> Any:
        """An instance on a copy of a KV state, its buffers full of NaN."""
        caches = [(k.clone(), v.clone()) for k, v in zip(kv.keys, kv.values, strict=True)]
        sizes = {"max_num_tokens": 64, "max_num_seqs": 16, **capacity}
        program = self.module.Program(self.weights, caches, **sizes)
        for memory in program.memory:
            memory.fill_(0xFF)  # NaN in every floating-point dtype
        program.caches = caches
        return program

    def check(self, inputs: Mapping[str, Any], tolerance: float) -> None:
        """Compare logits and caches with the interpreter's on one batch."""
        program = self.program(inputs["kv"])
        got = program(*(inputs[name] for name in STEP_INPUTS))
        want, state = interpret(self.graph, inputs, self.source)  # writes into inputs["kv"]
        assert isinstance(want, Tensor)
        assert isinstance(state, KVState)
        assert got.dtype == torch.float32
        assert_close(got, want, tolerance)
        caches = zip(program.caches, state.keys, state.values, strict=True)
        for (keys, values), want_keys, want_values in caches:
            assert_close(keys, want_keys, tolerance)
            assert_close(values, want_values, tolerance)


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Largest difference relative to the largest value; NaN only where the other has it."""
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    if want.numel() == 0:
        return
    gap = (got.float() - want.float()).abs().nan_to_num().max().item()
    scale = max(1.0, want.float().abs().nan_to_num().max().item())
    assert gap <= tolerance * scale, f"differs by {gap:.3g} of {scale:.3g}"


def _imported(directory: Path) -> Any:
    sys.path.insert(0, str(directory.parent))
    try:
        return importlib.import_module(f"{directory.name}.program")
    finally:
        sys.path.remove(str(directory.parent))
