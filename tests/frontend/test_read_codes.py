"""The traced graph reads the checkpoint's codes, and still agrees with Hugging Face."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from octavo.frontend.accounting import account
from octavo.frontend.check_trace import check_trace
from octavo.frontend.read_codes import read_codes
from octavo.frontend.source import open_weights, resolve
from octavo.frontend.trace import import_model
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.verify import verify
from octavo.passes.pipeline import run_pipeline
from tests.frontend.gguf_files import write_gguf
from tests.frontend.quantized_checkpoints import DATA


def read_graph(model: Path, dtype: torch.dtype = torch.float32) -> Graph:
    """The traced graph with the codes read, after its comparison with Hugging Face."""
    source = resolve(model)
    imported = import_model(source.config, dtype)
    weights = open_weights(source, imported.model)
    account(imported.model, weights)
    imported.buffers.update(read_codes(imported.graph, weights))
    verify(imported.graph)
    check_trace(imported, source.config, dtype, weights)
    return imported.graph


@pytest.mark.parametrize("name", ["ct-w4a16-zeros", "fp8-blocks", "bnb-nf4-double"])
def test_every_matrix_is_read_as_codes(name: str) -> None:
    graph = read_graph(DATA / name)
    sources = [
        node.attrs["key"] for node in graph.weight_nodes if node.op == "quantized_checkpoint"
    ]
    projections = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
    projections += ("mlp.gate", "mlp.up", "mlp.down")
    assert sorted(sources) == sorted(f"model.layers.0.{p}_proj.weight" for p in projections)
    floats = [n.attrs["key"] for n in graph.weight_nodes if n.op == "checkpoint"]
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in floats} == {
        *("input_layernorm", "post_attention_layernorm", "norm", "embed_tokens")
    }


def test_an_order_is_gathered_once_for_siblings() -> None:
    """And so they are still merged: four linears a layer, each with its own order of x."""
    graph = read_graph(DATA / "gptq-4bit-act-order")
    assert len(graph.find("gather_columns")) == 4
    run_pipeline(graph, max_position=64)
    linears = [node for node in graph.find("linear") if node.operand(0).producer is not None]
    gathered = [n for n in linears if n.operand(0).producer.op == "gather_columns"]  # type: ignore[union-attr]
    assert [tuple(node.operand(1).shape) for node in gathered] == [
        (128, 64),
        (64, 64),
        (256, 64),
        (64, 128),
    ]
    assert {node.operand(1).dtype for node in gathered} == {"uint4<1x32, f16, zero=u8>"}


def test_a_tied_embedding_is_looked_up_in_numbers(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The head multiplies by the codes; rows of the same matrix are dequantised for the look-up."""
    model = tiny_model("llama", intermediate_size=64, tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model, quantize=GGMLQuantizationType.Q4_1)
    graph = read_graph(tmp_path / "m.gguf")
    run_pipeline(graph, max_position=48)
    scheme = "uint4<1x32, f16, offset=f16>"
    assert {node.operand(1).dtype for node in graph.find("linear")} == {scheme}
    lookups = [node.operand(1) for node in graph.find("embedding")]
    [table] = [weight.producer for weight in lookups if weight.shape == (99, 32)]
    assert table is not None
    assert (table.op, table.operand(0).dtype) == ("dequantize", scheme)


def test_a_bias_of_zeros_is_explained(tmp_path: Path) -> None:
    shutil.copytree(DATA / "gptq-4bit", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    key = "model.layers.0.mlp.up_proj.bias"
    save_file({**load_file(path), key: torch.zeros(128)}, path)
    source = resolve(tmp_path / "m")
    imported = import_model(source.config, torch.float32)
    accounting = account(imported.model, open_weights(source, imported.model))
    assert accounting.explained == {key: "a bias of zeros, which the model does not have"}
    save_file({**load_file(path), key: torch.ones(128)}, path)
    with pytest.raises(OctavoError, match=rf"1 tensor not of this model \({key}\)"):
        account(imported.model, open_weights(source, imported.model))


def test_experts_are_read_as_numbers() -> None:
    """The op of experts takes no codes; a notice says so."""
    source = resolve(DATA / "mxfp4-gpt-oss")
    from octavo.frontend.meta_model import build_model

    weights = open_weights(source, build_model(source.config, torch.bfloat16))
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert weights.scheme(stack) is None
    assert weights.load(stack).shape == (2, 64, 128)
    assert weights.notices() == [
        "2 quantised tensors are read as numbers (such as model.layers.0.mlp.experts.down_proj)"
    ]
