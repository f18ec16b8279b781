"""What a traced graph looks like, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model_zoo import MORE, NUM_POSITIONS, TINY, WINDOW
from transformers import AutoConfig, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.trace import import_model
from octavo.ir.types import SymDim


def test_values_are_named_after_modules_and_know_their_source_line() -> None:
    graph = import_model(TINY["llama-tied"](), torch.bfloat16).graph
    assert [f"{value}: {value.type}" for value in graph.inputs] == [
        "%ids: i64[1, T]",
        "%positions: i64[1, T]",
    ]
    assert [f"{value}: {value.type}" for value in graph.outputs] == ["%logits: bf16[1, T, 256]"]
    expected_ops = {
        "%embed_tokens": "embedding",
        "%layers.1.input_layernorm": "mul",
        "%layers.1.self_attn.q_proj": "linear",
        "%layers.1.self_attn.attention": "attention",
        "%layers.1.mlp.act_fn": "silu",
        "%layers.1.mlp.down_proj": "linear",
        "%layers.1": "add",
        "%norm": "mul",
        "%logits": "linear",
    }
    for name, op in expected_ops.items():
        producer = graph.value(name).producer
        assert producer is not None
        assert producer.op == op, name
    origin = graph.value("%layers.1.mlp.down_proj").origin
    assert origin.module == "model.layers.1.mlp.down_proj"
    assert origin.source is not None
    assert origin.source.startswith("modeling_llama.py:")


def test_tied_weights_are_one_weight_under_the_owners_name() -> None:
    graph = import_model(TINY["llama-tied"](), torch.bfloat16).graph
    assert not graph.has_value("@lm_head.weight")
    embedding = graph.value("@embed_tokens.weight")
    assert embedding.producer is not None
    assert embedding.producer.attrs["key"] == "model.embed_tokens.weight"
    assert [user.op for user in graph.users(embedding)] == ["embedding", "linear"]


def test_windows_and_softcaps_are_attributes_of_attention() -> None:
    imported = import_model(TINY["gemma2"](), torch.float32)
    nodes = imported.graph.find("attention")
    assert imported.attention_calls == len(nodes) == 4
    assert [node.attrs["window"] for node in nodes] == [WINDOW, None, WINDOW, None]
    assert {node.attrs["softcap"] for node in nodes} == {50.0}
    assert {node.attrs["scale"] for node in nodes} == {24**-0.5}


def test_chunked_attention_is_found() -> None:
    config = AutoConfig.for_model(
        "llama4_text",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=NUM_POSITIONS,
        attention_chunk_size=WINDOW,
        num_local_experts=1,
        moe_layers=[],
        pad_token_id=0,
    )
    nodes = import_model(config, torch.float32).graph.find("attention")
    assert [node.attrs["chunk"] for node in nodes] == [WINDOW, WINDOW, WINDOW, None]


def test_only_the_number_of_tokens_is_symbolic() -> None:
    graph = import_model(TINY["phi3"](), torch.float32).graph
    dims = {dim for node in graph.nodes for value in node.outputs for dim in value.shape}
    assert {dim for dim in dims if isinstance(dim, SymDim)} == {SymDim("T")}


def test_tracing_leaves_nothing_behind() -> None:
    config = TINY["mistral"]()
    before = config.to_dict()
    find_packed = masking_utils.find_packed_sequence_indices
    imported = import_model(config, torch.bfloat16)
    assert config.to_dict() == before
    assert masking_utils.find_packed_sequence_indices is find_packed
    assert "octavo" not in transformers.AttentionInterface().valid_keys()
    assert "octavo" not in AttentionMaskInterface().valid_keys()
    assert all(parameter.is_meta for parameter in imported.model.parameters())
    assert not any(buffer.is_meta for buffer in imported.buffers.values())


def test_longrope_is_bounded_by_the_length_it_switches_at() -> None:
    imported = import_model(MORE["phi3-longrope"](), torch.float32)
    assert imported.max_position == 48
    (notice,) = imported.notices
    assert "limited to 48 of 256" in notice
    assert import_model(TINY["phi3"](), torch.float32).max_position == NUM_POSITIONS


LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
}


def test_dynamic_rope_is_plain_rope_up_to_the_stated_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    dynamic = import_model(
        AutoConfig.for_model("llama", **LLAMA, rope_parameters=rope), torch.float32
    )
    plain = import_model(AutoConfig.for_model("llama", **LLAMA), torch.float32)
    assert dynamic.max_position == NUM_POSITIONS
    assert [n.op for n in dynamic.graph.nodes] == [n.op for n in plain.graph.nodes]
    key = "model.rotary_emb.inv_freq"
    assert torch.equal(dynamic.buffers[key], plain.buffers[key])


_GPT = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "position_ids"),
    ("falcon", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}, "interface"),
    ("mpt", {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4}, "position_ids"),
    ("openai-gpt", {**_GPT, "n_positions": 256}, "0 of 2 layers attend through"),
    (
        "xglm",
        {"vocab_size": 256, "d_model": 64, "num_layers": 2, "attention_heads": 4},
        "interface",
    ),
    ("mamba", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}, "carry a state"),
    ("lfm2", {**LLAMA, "layer_types": ["conv", "full_attention"]}, "conv layers carry a state"),
    (
        "mixtral",
        {**LLAMA, "num_local_experts": 4},
        "mixture-of-experts",
    ),
    ("qwen3_moe", {**LLAMA, "num_experts": 4}, "mixture-of-experts"),
    (
        "qwen3_5_text",
        {**LLAMA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        "linear_attention layers carry a state",
    ),
    (
        "llama",
        {**LLAMA, "layer_types": ["indexed_attention", "full_attention"]},
        "indexed_attention layers are not supported yet",
    ),
    ("llama", {**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers is -1; expected 1 or more"),
    ("gpt2", {**_GPT, "n_layer": 0}, "n_layer is 0; expected 1 or more"),
    ("llama", {**LLAMA, "vocab_size": 0}, "vocab_size is 0; expected 1 or more"),
    (
        "llama",
        {**LLAMA, "max_position_embeddings": 10**9},
        "max_position_embeddings is 1000000000; expected 1 to 16777216",
    ),
    ("llama", {**LLAMA, "hidden_act": "foo"}, "no 'foo', which its config has as hidden_act"),
    (
        "llama",
        {**LLAMA, "rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
        "no 'foo', which its config has as rope_parameters.rope_type",
    ),
    ("t5", {"vocab_size": 256, "d_model": 64, "num_layers": 2}, "encoder-decoder"),
]


@pytest.mark.parametrize(
    ("model_type", "sizes", "reason"),
    REFUSED,
    ids=[f"{model}-{why}" for model, _, why in REFUSED],
)
def test_what_would_come_out_wrong_is_refused(
    model_type: str, sizes: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(model_type, **sizes)
    with pytest.raises(RefusedArchitecture, match=reason) as caught:
        import_model(config, torch.float32)
    assert str(caught.value).startswith(f"{model_type}: ")
    assert "\n" not in str(caught.value)
