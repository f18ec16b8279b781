"""Quantised checkpoints give, bit for bit, what the libraries that made them read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.frontend.checkpoint import open_checkpoint
from octavo.frontend.quantized.mxfp4 import Mxfp4Experts
from tests.frontend.quantized_checkpoints import (
    DATA,
    NAMES,
    digest,
    library_digests,
    open_directory,
    open_named,
)

GATE = "model.layers.0.mlp.gate_proj.weight"
SCHEMES = {
    "awq-gemm": "uint4<1x32, f16, zero=u8>",
    "bnb-int8": "int8<1x*, f32>",
    "bnb-nf4": "nf4<1x64, f32>",
    "bnb-nf4-double": "nf4<1x64, f32>",
    "ct-fp8-block": "f8e4m3<48x48, bf16, x=f8e4m3/128>",
    "ct-fp8-channel": "f8e4m3<1x*, bf16, x=f8e4m3>",
    "ct-fp8-tensor": "f8e4m3<*x*, bf16, x=f8e4m3>",
    "ct-w4a16": "int4<1x32, bf16>",
    "ct-w4a16-zeros": "uint4<1x32, bf16, zero=u8>",
    "ct-w8a16": "int8<1x*, bf16>",
    "ct-w8a16-zeros": "uint8<1x*, bf16, zero=u8>",
    "ct-w8a8-int": "int8<1x*, bf16, x=i8>",
    "fp8-blocks": "f8e4m3<128x128, f32, x=f8e4m3/128>",
    "fp8-tensor": "f8e4m3<*x*, f32, x=f8e4m3>",
    "gptq-4bit": "int4<1x32, f16>",
    "gptq-4bit-act-order": "uint4<1x32, f16, zero=u8>",
    "gptq-8bit": "int8<1x*, f16>",
    "gptq-8bit-zeros": "uint8<1x32, f16, zero=u8>",
    "gptq-v2-4bit": "uint4<1x64, f16, zero=u8>",
}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_librarys(name: str) -> None:
    store = open_named(name)
    expected = library_digests(name)
    assert len(expected) in (2, 7)  # two stacks of experts, or the matrices of a layer
    for key, entry in expected.items():
        assert list(store.info(key).shape) == entry["shape"]
        values = store.read(key)
        assert (values.dtype, list(values.shape)) == (torch.float32, entry["shape"])
        assert digest(values.to(getattr(torch, entry["dtype"]))) == entry["sha256"], key


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_codes_are_kept(name: str) -> None:
    """The scheme is known before the codes are read, and codes and columns make up the values."""
    store = open_named(name)
    assert str(store.scheme(GATE)) == SCHEMES[name]
    for key in library_digests(name):
        matrix, columns = store.read_quantized(key), store.columns(key)
        assert matrix.scheme == store.scheme(key)
        values = store.read(key)
        sorted_values = values if columns is None else values[:, columns]
        assert torch.equal(matrix.dequantize(), sorted_values)


@pytest.mark.parametrize("name", NAMES)
def test_no_part_is_left_over(name: str) -> None:
    """What is neither a weight of the model nor part of one is explained."""
    store = open_named(name)
    plain = {key for key in store.names() if store.scheme(key) is None} - {*library_digests(name)}
    norms_and_more = ("norm.weight", "embed_tokens.weight", "sinks", "bias", "router.weight")
    attention = "_proj.weight" if name == "mxfp4-gpt-oss" else "none"
    assert [key for key in plain if not key.endswith((*norms_and_more, attention))] == []
    reasons = {key.rpartition(".")[2] for key in store.explained}
    static = {"ct-fp8-tensor": {"input_scale"}, "fp8-tensor": {"activation_scale"}}
    formats = {"bnb-int8": {"weight_format"}}
    assert reasons == static.get(name, formats.get(name, set()))


def test_act_order_is_shared_by_siblings() -> None:
    store = open_named("gptq-4bit-act-order")
    columns = {
        name: store.columns(f"model.layers.0.{name}.weight")
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    }
    first = columns["self_attn.q_proj"]
    assert first is not None
    assert sorted(first.tolist()) == list(range(64))
    assert first.tolist() != list(range(64))
    assert all(
        torch.equal(first, columns[f"self_attn.{name}_proj"])  # type: ignore[arg-type]
        for name in "kv"
    )
    assert not torch.equal(first, columns["mlp.up_proj"])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["self_attn.{}_scale", "self_attn.{}_proj.output_scale"])
def test_kv_scales_of_a_checkpoint(form: str, tmp_path: Path) -> None:
    """Written here: with this transformers the library finds no attention to give scales to."""
    shutil.copytree(DATA / "ct-fp8-tensor", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    added = {
        f"model.layers.0.{form.format('k')}": torch.tensor([0.03], dtype=torch.bfloat16),
        f"model.layers.0.{form.format('v')}": torch.tensor([0.02], dtype=torch.bfloat16),
    }
    save_file({**load_file(path), **added}, path)
    store = open_directory(tmp_path / "m")
    assert not added.keys() & {*store.names(), *store.explained}
    scales = store.kv_scales()
    attention = "model.layers.0.self_attn"
    assert scales.keys() == {f"{attention}.k_scale", f"{attention}.v_scale"}
    assert scales[f"{attention}.k_scale"].item() == pytest.approx(0.03, rel=2**-8)
    assert scales[f"{attention}.v_scale"].item() == pytest.approx(0.02, rel=2**-8)


def test_experts_one_by_one() -> None:
    key = "model.layers.0.mlp.experts.gate_up_proj"
    store = open_named("mxfp4-gpt-oss")
    experts = Mxfp4Experts(open_checkpoint(DATA / "mxfp4-gpt-oss"), key).read_experts()
    assert [str(matrix.scheme) for matrix in experts] == ["f4e2m1<1x32, f8e8m0>"] * 2
    assert torch.equal(torch.stack([m.dequantize().T for m in experts]), store.read(key))
