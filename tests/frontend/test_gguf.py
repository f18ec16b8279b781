"""GGUF: values, names and config come back as the Hugging Face model had them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.frontend.accounting import account
from octavo.frontend.gguf_header import read_gguf_header
from octavo.frontend.source import open_weights, resolve
from octavo.ir.errors import OctavoError
from tests.frontend.gguf_files import write_gguf

MODEL_TYPES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt2", "phi3"]
SHAPE_KEYS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_comes_back(
    model_type: str, tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model(model_type)
    write_gguf(tmp_path / "m.gguf", model)
    source = resolve(tmp_path / "m.gguf")
    assert (source.kind, source.name) == ("gguf", "m")
    for key in SHAPE_KEYS:
        assert getattr(source.config, key) == getattr(model.config, key), key
    meta_model = on_meta(source.config)
    weights = open_weights(source, meta_model)
    account(meta_model, weights)
    for key, value in model.state_dict().items():
        loaded = weights.load(key)
        assert weights.info(key).shape == tuple(loaded.shape)
        assert loaded.dtype == torch.float32
        # Gemma's norms are stored plus one, which rounds.
        torch.testing.assert_close(loaded, value, rtol=0, atol=3e-7)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    same = type(model)(source.config).eval()
    same.load_state_dict({key: weights.load(key) for key in same.state_dict()})
    torch.testing.assert_close(same(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_the_config_is_what_transformers_reads(
    model_type: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    tokenizer = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(99)]}
    tokenizer_ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.bos_token_id": 6}
    write_gguf(path, tiny_model(model_type), metadata={**tokenizer, **tokenizer_ids})
    config = resolve(path).config
    for key, value in load_gguf_checkpoint(path)["config"].items():
        if key == "rope_theta":
            rope = config.rope_parameters
            assert rope.get("full_attention", rope)["rope_theta"] == value
        elif key != "_model_name_or_path":
            assert getattr(config, key) == value, key


def test_a_tied_head_is_absent(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model)
    source = resolve(tmp_path / "m.gguf")
    weights = open_weights(source, on_meta(source.config))
    assert "lm_head.weight" not in weights.keys()
    assert torch.equal(weights.load("lm_head.weight"), model.lm_head.weight)


def test_q8_0_blocks_by_hand(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    """A block is an fp16 scale and 32 int8; read here from the file's bytes."""
    path = tmp_path / "m.gguf"
    model = tiny_model("llama", intermediate_size=64)
    write_gguf(path, model, quantize=gguf.GGMLQuantizationType.Q8_0)
    place = read_gguf_header(path).tensors["blk.1.ffn_down.weight"]
    assert (place.shape, place.num_bytes) == ((32, 64), 32 * 64 // 32 * 34)
    blocks = np.frombuffer(path.read_bytes()[place.offset :][: place.num_bytes], np.uint8)
    blocks = blocks.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (scales * blocks[:, 2:].view(np.int8)).reshape(32, 64)
    source = resolve(path)
    loaded = open_weights(source, on_meta(source.config)).load(
        "model.layers.1.mlp.down_proj.weight"
    )
    assert np.array_equal(loaded.numpy(), expected)
    assert (
        np.abs(expected - model.model.layers[1].mlp.down_proj.weight.numpy(force=True)).max() < 0.02
    )


def test_llama3_scaling_is_restored(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """The divisors of Llama 3.2: 1 above the band, 32 below, a ramp between (its published"
    " rule)."""
    model = tiny_model("llama", head_dim=64, rope_theta=500000.0)
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    divisors = 1 / ((1 - smooth) / 32 + smooth)
    extra = {"rope_freqs.weight": divisors.astype(np.float32)}
    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    rope = resolve(tmp_path / "m.gguf").config.rope_parameters
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_gguf(
        tmp_path / "m.gguf", model, extra={"rope_freqs.weight": extra["rope_freqs.weight"] ** 2}
    )
    with pytest.raises(OctavoError, match=r"scaling in rope_freqs\.weight that is not Llama 3's"):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 512},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling_is_kept(
    metadata: dict[str, Any],
    expected: dict[str, Any],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    scaling = {f"{{arch}}.rope.scaling.{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), metadata=scaling)
    rope = resolve(tmp_path / "m.gguf").config.rope_parameters
    assert rope == {**expected, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ({"{arch}.rope.dimension_count": 4}, "RoPE over 4 of 8 dimensions is not supported"),
        ({"{arch}.expert_count": 8}, "with experts"),
    ],
)
def test_what_would_be_wrong_is_refused(
    metadata: dict[str, Any], message: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), metadata=metadata)
    with pytest.raises(OctavoError, match=message):
        resolve(tmp_path / "m.gguf")


def test_an_extra_tensor_is_named(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra=extra)
    source = resolve(tmp_path / "m.gguf")
    model = on_meta(source.config)
    with pytest.raises(
        OctavoError, match=r"1 tensor not of this model \(blk.0.attn_sinks.weight\)"
    ):
        account(model, open_weights(source, model))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(OctavoError, match=r"'falcon' is not supported yet \(supported: gemma2"):
        resolve(tmp_path / "m.gguf")


def test_every_cut_is_refused(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_gguf(whole, tiny_model("llama"))
    data = whole.read_bytes()
    for size in [*range(0, 600, 7), *range(600, len(data), 9973), len(data) - 32]:
        cut.write_bytes(data[:size])
        with pytest.raises(OctavoError, match=r"^cut.gguf is cut short: .*again$"):
            resolve(cut)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGML" + b"\0" * 60, "is not a GGUF file"),
        (b"GGUF\x09\0\0\0" + b"\0" * 60, "version 9; expected 2 or 3"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 60, "cut short"),
        (b"GGUF\x03\0\0\0" + b"\0" * 60, "no general.architecture"),
    ],
)
def test_what_is_not_gguf(start: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(start)
    with pytest.raises(OctavoError, match=message):
        resolve(tmp_path / "m.gguf")


def test_smollm2_is_whole(smollm2_gguf: Path, on_meta: Callable[..., Any]) -> None:
    source = resolve(smollm2_gguf)
    model = on_meta(source.config)
    accounting = account(model, open_weights(source, model))
    assert len(accounting.used) == 272
    assert accounting.tied == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads(
    smollm2_gguf: Path, on_meta: Callable[..., Any]
) -> None:
    source = resolve(smollm2_gguf)
    model = on_meta(source.config)
    theirs = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=model)["tensors"]
    weights = open_weights(source, model)
    assert set(theirs) >= set(weights.keys())
    for key in weights.keys():
        assert torch.equal(weights.load(key), theirs[key]), key
