"""Programs of quantised weights for a GPU, in Triton's interpreter, give what the graph says."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.codegen.target import resolve_target
from octavo.ir.types import QuantType
from octavo.passes.pipeline import CUDA_PIPELINE, run_pipeline
from octavo.passes.quant_recipe import Quantization
from octavo.quantize import find_recipe
from tests.codegen.batches import batch
from tests.codegen.llama import llama
from tests.codegen.loading import Compiled

pytest.importorskip("triton")

PASSES = CUDA_PIPELINE[CUDA_PIPELINE.index("gather-before-norm") :]  # the graph is cleaned already
BATCHES = [[(0, 1)], [(0, 13)], [(5, 1), (3, 1), (12, 1)], [(9, 1), (0, 6), (2, 1)]]


@pytest.mark.parametrize(
    "scheme",
    [
        "int4<1x16, bf16>",
        "uint4<1x16, f16, zero=u8>",
        "f8e4m3<1x*, f32, x=f8e4m3>",
        "int8<1x*, f32>",
    ],
)
def test_program_matches_the_interpreter(scheme: str, tmp_path: Path) -> None:
    sizes = {"layers": 2, "dtype": "f32", "hidden": 64, "head_dim": 16, "v_head_dim": 16}
    plain, graph = llama(**sizes), llama(**sizes)
    recipe = find_recipe(scheme, dtype="f32", target=resolve_target("cuda:sm_90"))
    run_pipeline(graph, max_position=64, passes=PASSES, quantization=Quantization(recipe))
    held = [value for value in graph.used_weights() if isinstance(value.type, QuantType)]
    assert len(held) == 8, "qkv, o, gate_up and down of two layers"
    name = "".join(letter for letter in scheme if letter.isalnum())
    compiled = Compiled(graph, tmp_path / f"quant_{name}", "cuda:sm_90")
    for seed, sequences in enumerate(BATCHES):
        compiled.check(batch(plain, sequences, seed=seed), 2e-5)
