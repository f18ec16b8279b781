"""Rendered programs give what the interpreter gives, on batches with every kind of edge."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.codegen.generate import STEP_INPUTS
from octavo.ir.interpret import interpret
from tests.codegen.batches import batch
from tests.codegen.llama import llama
from tests.codegen.loading import Compiled, assert_close

# f32: sums in another order. bf16: q, k, v, the residual and each result round to 8 bits, and a
# difference of one rounding early on is carried through all layers.
TOLERANCE = {"f32": 2e-5, "bf16": 4e-2}

BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token of one sequence": [(0, 1)],
    "one prompt": [(0, 13)],
    "a prompt that fills its blocks": [(0, 8)],
    "decode": [(5, 1), (3, 1), (12, 1), (0, 1), (7, 1)],
    "decode at one length": [(6, 1), (6, 1), (6, 1)],
    "chunks that start inside, at and after a block's edge": [(3, 5), (4, 5), (5, 5)],
    "prefill, chunk and decode": [(9, 1), (0, 6), (2, 1), (4, 7), (11, 1)],
    "a sequence without new tokens": [(5, 1), (6, 0), (0, 3)],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "odd": {"heads": 3, "kv_heads": 3, "head_dim": 16, "v_head_dim": 16, "hidden": 40},
    "value dim differs": {"v_head_dim": 12},
    "partial rotary": {"rotary_dim": 4},
    "interleaved rotary": {"interleaved": True},
    "window below a block": {"windows": (3,)},
    "window of a block": {"windows": (4,)},
    "window above a block": {"windows": (5,)},
    "local and global": {"windows": (6, None), "layers": 4},
    "chunked": {"chunk": 5},
    "chunked with a window": {"chunk": 8, "windows": (6,)},
    "softcap": {"softcap": 3.0},
    "softcap and window": {"softcap": 3.0, "windows": (5,)},
    "sinks": {"has_sinks": True},
    "sinks, window, mha": {"has_sinks": True, "windows": (5, None), "kv_heads": 4},
    "weight offset": {"weight_offset": 1.0},
    "wide heads": {"head_dim": 256, "v_head_dim": 256, "heads": 2, "kv_heads": 1},
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_program_matches_the_interpreter(variant: str, dtype: str, tmp_path: Path) -> None:
    graph = llama(**{"layers": 2, "dtype": dtype, **VARIANTS[variant]})
    compiled = Compiled(graph, tmp_path / _name(variant, dtype))
    for seed, sequences in enumerate(BATCHES.values()):
        for is_in_a_row in (False, True):
            inputs = batch(graph, sequences, is_in_a_row=is_in_a_row, seed=seed)
            compiled.check(inputs, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "rows", [[], [0], [2, 2, 0, 1, 1, 0, 2, 1]], ids=["no rows", "one", "more rows than tokens"]
)
def test_any_number_of_logit_rows(rows: list[int], tmp_path: Path) -> None:
    graph = llama(layers=2)
    compiled = Compiled(graph, tmp_path / f"rows_{len(rows)}")
    compiled.check(batch(graph, [(0, 3)], rows=rows), TOLERANCE["f32"])


def test_a_step_larger_than_announced_grows_the_buffers(tmp_path: Path) -> None:
    graph = llama(layers=2)
    compiled = Compiled(graph, tmp_path / "grows")
    inputs = batch(graph, [(0, 9), (3, 2)])
    program = compiled.program(inputs["kv"], max_num_tokens=2, max_num_seqs=1)
    got = program(*(inputs[name] for name in STEP_INPUTS))
    assert_close(got, interpret(graph, inputs, compiled.source)[0], TOLERANCE["f32"])


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(tmp_path: Path) -> None:
    graph = llama(layers=2, windows=(6, None))
    compiled = Compiled(graph, tmp_path / "chunks")
    whole = batch(graph, [(0, 13)])
    program = compiled.program(whole["kv"])
    want = program(*(whole[name] for name in STEP_INPUTS)).clone()
    program = compiled.program(whole["kv"])
    for start, end in ((0, 5), (5, 6), (6, 12), (12, 13)):
        part = {name: whole[name][start:end] for name in ("ids", "positions", "slot_mapping")}
        part["block_table"] = whole["block_table"]
        part["query_start"] = torch.tensor([0, end - start], dtype=torch.int32)
        part["seq_lens"] = torch.tensor([end], dtype=torch.int32)
        part["logit_rows"] = torch.tensor([end - start - 1])
        got = program(*(part[name] for name in STEP_INPUTS))
    assert_close(got, want, TOLERANCE["f32"])


def test_many_sequences_give_what_each_gives_alone(tmp_path: Path) -> None:
    graph = llama(layers=2)
    compiled = Compiled(graph, tmp_path / "alone")
    inputs = batch(graph, [(5, 1), (0, 4), (9, 1), (2, 3)])
    together = compiled.program(inputs["kv"])(*(inputs[name] for name in STEP_INPUTS)).clone()
    starts = inputs["query_start"].tolist()
    for seq, (start, end) in enumerate(pairwise(starts)):
        part = {name: inputs[name][start:end] for name in ("ids", "positions", "slot_mapping")}
        part["block_table"] = inputs["block_table"][seq : seq + 1]
        part["query_start"] = torch.tensor([0, end - start], dtype=torch.int32)
        part["seq_lens"] = inputs["seq_lens"][seq : seq + 1]
        part["logit_rows"] = torch.tensor([end - start - 1])
        alone = compiled.program(inputs["kv"])(*(part[name] for name in STEP_INPUTS))
        assert_close(alone, together[seq : seq + 1], TOLERANCE["f32"])


def test_the_program_names_modules_and_has_one_body(tmp_path: Path) -> None:
    compiled = Compiled(llama(layers=5), tmp_path / "names")
    assert compiled.text.count("def _layer(") == 1
    assert compiled.text.count("for w in self.layers:\n") == 1
    assert compiled.text.count("self._layer(") == 1
    assert "# model.layers.*.mlp.down_proj" in compiled.text
    kernel = next(k for k in compiled.generated.kernels if k.op == "rms_norm")
    assert kernel.text.startswith("# op: rms_norm\n# template: cpu/rms_norm.py.j2\n# constants: ")
    assert "hidden=32 dtype=f32" in kernel.text.splitlines()[2]


def _name(variant: str, dtype: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in f"llama_{variant}_{dtype}")
