"""GGML's types as codes and scales stand for exactly what the gguf package dequantises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from octavo.frontend.gguf_header import read_gguf_header
from octavo.frontend.quantized.ggml import kept_scheme, unpack_rows
from octavo.frontend.source import open_weights, resolve
from octavo.ir.errors import OctavoError
from tests.frontend.gguf_files import random_rows, write_gguf

KEPT = {
    "Q4_0": "int4<1x32, f16>",
    "Q4_1": "uint4<1x32, f16, offset=f16>",
    "Q8_0": "int8<1x32, f16>",
    "Q4_K": "uint4<1x32, f32, offset=f32>",
    "Q5_K": "uint5<1x32, f32, offset=f32>",
    "Q6_K": "int6<1x16, f32>",
}


@pytest.mark.parametrize("columns", [256, 768])
@pytest.mark.parametrize("name", sorted(KEPT))
def test_bit_for_bit(name: str, columns: int) -> None:
    kind = GGMLQuantizationType[name]
    packed = torch.from_numpy(random_rows(kind, 5, columns, deviation=0.02))
    matrix = unpack_rows(kind, packed, columns)
    matrix.check()
    assert str(kept_scheme(kind)) == str(matrix.scheme) == KEPT[name]
    expected = torch.from_numpy(quants.dequantize(packed.numpy(), kind).copy())
    assert expected.shape == (5, columns)
    assert torch.equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3"])
def test_rows_of_a_file_are_the_models(
    name: str,
    model_type: str,
    tiny_model: Callable[..., Any],
    on_meta: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Q and K of llama are permuted in the file: codes and scales are put back alike."""
    path = tmp_path / "m.gguf"
    model = tiny_model(model_type, intermediate_size=64)
    write_gguf(path, model, quantize=GGMLQuantizationType[name])
    source = resolve(path)
    weights = open_weights(source, on_meta(source.config))
    matrices = [key for key, value in model.state_dict().items() if value.dim() == 2]
    for key in matrices:
        assert str(weights.scheme(key)) == KEPT[name]
        assert weights.columns(key) is None
        assert torch.equal(weights.load_quantized(key).dequantize(), weights.load(key)), key
    assert weights.scheme("model.norm.weight") is None
    assert weights.notices() == []


def test_a_transposed_matrix_is_read_as_numbers(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    """gpt2's linears lie transposed in the model: blocks would run down its columns."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("gpt2"), quantize=GGMLQuantizationType.Q8_0)
    source = resolve(path)
    weights = open_weights(source, on_meta(source.config))
    assert weights.scheme("transformer.h.0.attn.c_attn.weight") is None
    assert str(weights.scheme("transformer.wte.weight")) == "int8<1x32, f16>"
    assert weights.notices() == ["m.gguf: 8 tensors of type Q8_0 are read as numbers"]


def test_a_type_that_is_not_kept_is_noticed(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama", intermediate_size=64), quantize=GGMLQuantizationType.Q5_0)
    source = resolve(path)
    weights = open_weights(source, on_meta(source.config))
    assert weights.scheme("model.layers.0.mlp.up_proj.weight") is None
    [notice] = weights.notices()
    assert notice.startswith("m.gguf: ")
    assert notice.endswith(" tensors of type Q5_0 are read as numbers")


def test_a_tied_head_has_the_codes_of_the_embedding(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    model = tiny_model("llama", intermediate_size=64, tie_word_embeddings=True)
    write_gguf(path, model, quantize=GGMLQuantizationType.Q8_0)
    source = resolve(path)
    weights = open_weights(source, on_meta(source.config))
    head = weights.load_quantized("lm_head.weight")
    assert torch.equal(head.codes, weights.load_quantized("model.embed_tokens.weight").codes)


def test_a_scale_that_is_no_number_is_refused(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama", intermediate_size=64), quantize=GGMLQuantizationType.Q8_0)
    place = read_gguf_header(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[place.offset : place.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    source = resolve(path)
    weights = open_weights(source, on_meta(source.config))
    with pytest.raises(OctavoError, match=r"blk\.0\.ffn_up\.weight: 1 of \d+ scales are infinite"):
        weights.load_quantized("model.layers.0.mlp.up_proj.weight")
