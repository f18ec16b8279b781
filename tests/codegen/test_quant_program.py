"""Programs of quantised weights for a GPU, in Triton's interpreter, give what the graph says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from octavo.codegen.target import resolve_target
from octavo.frontend.trace import Imported
from octavo.ir.types import QuantType
from octavo.passes.fused_linear import has_part
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


# Who adds up the squares of a single row: products of 4-bit codes do, GEMVs do not. Who then reads
# the sums has a norm, and is qkv and gate_up.
MIXED: dict[str, Any] = {
    "all": ({"*": "int4<1x16, bf16>"}, [True] * 4),
    "down_by_gemv": (
        {"*.down_proj": "int8<1x*, f32>", "*": "int4<1x16, bf16>"},
        [True, True, False, True],
    ),
    "o_whole": ({"*.o_proj": "none", "*": "int4<1x16, bf16>"}, [True, False, True, False]),
    "read_by_gemv": (
        {"*.o_proj": "int4<1x16, bf16>", "*": "int8<1x*, f32>"},
        [True, True, False, True],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_who_sums_squares_of_one_row(
    traced: Callable[[str, Any], Imported], name: str, tmp_path: Path
) -> None:
    lines, sums = MIXED[name]
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(lines, sort_keys=False))
    recipe = find_recipe(str(file), dtype="f32", target=resolve_target("cuda:sm_90"))
    imported = traced("llama", torch.float32)
    run_pipeline(
        imported.graph,
        max_position=imported.max_position,
        target="cuda",
        quantization=Quantization(recipe),
    )
    readers = [node for node in imported.graph.find("fused_linear") if has_part(node, "sumsq")]
    rules = (resolve_target("cuda:sm_90").rules[node.op](node) for node in readers)
    found = [dict(rule.kernel.constants)["sums_one_row"] for rule in rules if rule is not None]
    assert found == sums
    compiled = Compiled(imported.graph, tmp_path / f"sums_{name}", "cuda:sm_90")
    for sequences in ([(0, 1)], [(5, 1)], [(5, 1), (3, 1)]):
        compiled.check(batch(imported.graph, sequences), 2e-5)
