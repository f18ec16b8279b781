"""What the cuda pipeline leaves of a layer: which kernels run, one after the other.

Views are no kernels. The layer looked at is the last: the first has the embedding before it, all
have the norm of the next one behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.frontend.trace import Imported
from octavo.ir.graph import Graph, Node
from octavo.passes.layers import layer_of
from octavo.passes.pipeline import Stage, run_pipeline

VIEWS = ("split", "slice", "reshape", "transpose", "unsqueeze", "squeeze", "gather_rows")

QKV = "fused_linear norm sumsq"
GATE_UP = "fused_linear norm sumsq silu"
ATTENTION = "rotary_paged_attention"
STREAM = "fused_linear residual emit_sumsq"
END = "fused_linear residual"
FIVE = [QKV, ATTENTION, STREAM, GATE_UP, END]
GEMMA = [
    "fused_linear norm",
    ATTENTION,
    "linear",
    "rms_norm",
    "pointwise",
    "fused_linear norm gelu_tanh",
    "linear",
    "rms_norm",
    "pointwise",
]
GPT2 = [
    "layer_norm",
    "linear bias",
    "kv_write",
    "paged_attention",
    "fused_linear bias residual",
    "layer_norm",
    "linear bias",
    "pointwise",
    "fused_linear bias residual",
]

LAYERS: dict[str, list[str]] = {
    "llama": FIVE,
    "llama-tied": FIVE,
    "qwen2": ["fused_linear bias norm sumsq", *FIVE[1:]],
    "qwen3": [QKV, f"{ATTENTION} norm", *FIVE[2:]],
    "mistral": FIVE,
    "phi3": FIVE,
    "gemma2": GEMMA,
    "gemma3_text": [GEMMA[0], f"{ATTENTION} norm", *GEMMA[2:]],
    "gpt2": GPT2,
}
_OPERANDS = ("bias", "residual", "sumsq")
TIED = ("llama-tied", "qwen2", "gemma2", "gemma3_text", "gpt2")


def _fused(imported: Imported) -> Graph:
    run_pipeline(imported.graph, max_position=imported.max_position, target="cuda")
    return imported.graph


def _words(node: Node) -> list[str]:
    """The op, and what of its optional parts it has."""
    operands = dict(zip(_OPERANDS, node.inputs[2:], strict=False)) if "linear" in node.op else {}
    parts = {
        "bias": operands.get("bias"),
        "residual": operands.get("residual"),
        "norm": node.attrs.get("norm_eps"),
        "sumsq": operands.get("sumsq"),
        node.attrs.get("activation"): node.attrs.get("activation"),
        "emit_sumsq": node.attrs.get("emit_sumsq"),
    }
    return [node.op, *(word for word, part in parts.items() if part)]


def _kernels(graph: Graph, layer: int | None) -> list[str]:
    nodes = (node for node in graph.nodes if node.op not in VIEWS)
    return [" ".join(_words(n)) for n in nodes if layer_of(n.outputs[0].name) == layer]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_a_layer(
    traced: Callable[[str, Any], Imported], name: str, dtype: torch.dtype
) -> None:
    graph = _fused(traced(name, dtype))
    last = 3 if "gemma" in name else 1
    assert _kernels(graph, last) == LAYERS[name]
    tail = graph.nodes[-1]
    assert tail.op in ("linear", "fused_linear")
    assert tail.outputs[0].dtype == "f32"
    if name in TIED:
        # The embedding needs the weight as it is, so the norm stays, of the sampled rows alone.
        assert str(tail.operand(1)) in ("@embed_tokens.weight", "@wte.weight")
        assert str(tail.operand(0).shape[0]) == "R"
    else:
        assert tail.attrs["norm_eps"] is not None
    assert tail.attrs.get("cap") == (30.0 if name == "gemma2" else None)


def test_a_fused_node_says_where_its_parts_came_from(
    traced: Callable[[str, Any], Imported],
) -> None:
    seen: dict[str, tuple[str, ...]] = {}

    def look(stage: Stage) -> None:
        if graph.has_value("%layers.0.mlp.down_proj"):
            seen[stage.name] = graph.value("%layers.0.mlp.down_proj").origin.values

    imported = traced("llama", torch.bfloat16)
    graph = imported.graph
    run_pipeline(graph, max_position=imported.max_position, target="cuda", on_stage=look)
    assert seen["fuse-linear-add"] == ("%layers.0.mlp.down_proj", "%layers.0")
    assert graph.value("%layers.0.mlp.down_proj").origin.module == "model.layers.0.mlp.down_proj"
    names = [str(node.outputs[0]) for node in graph.find("fused_linear")]
    assert names[:4] == [
        "%layers.0.self_attn.qkv",
        "%layers.0.self_attn.o_proj",
        "%layers.0.mlp.gate_up",
        "%layers.0.mlp.down_proj",
    ]
