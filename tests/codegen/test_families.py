"""Every kernel of six model families compiles for sm_80 and sm_90, fits, and does not spill.

No weights and no GPU: a config is compiled with ``--no-weights``. Two layers of each kind have the
kernels of all layers. Minutes a family, so under a marker of its own; CI runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.compile import compile_model

pytestmark = [pytest.mark.cross_compile, pytest.mark.timeout(1200)]

# Bytes of shared memory that a program may use: CUDA C programming guide, compute capabilities.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024}

_LLAMA_LIKE = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA_LIKE,
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "qwen2.5-0.5b": {
        **_LLAMA_LIKE,
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_LLAMA_LIKE,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma2-2b": {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "phi3-mini": {
        **_LLAMA_LIKE,
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "pad_token_id": 32000,
    },
}


# Families, and some with quantised weights or a KV cache of codes; sm_80 cannot convert FP8 ones.
BOTH = "sm_90,sm_80"
CASES: dict[str, tuple[str, str, str | None, str]] = {
    **{name: (name, BOTH, None, "auto") for name in FAMILIES},
    "llama-3.1-8b, int4, int8 KV": ("llama-3.1-8b", BOTH, "int4", "int8"),
    "llama-3.1-8b, fp8, fp8 KV": ("llama-3.1-8b", "sm_90", "fp8", "fp8"),
    "qwen2.5-0.5b, int4-g32": ("qwen2.5-0.5b", "sm_90", "int4-g32", "auto"),
}


@pytest.mark.parametrize(
    ("name", "archs", "quant", "kv_cache_dtype"), CASES.values(), ids=list(CASES)
)
def test_every_kernel_compiles_fits_and_does_not_spill(
    name: str, archs: str, quant: str | None, kv_cache_dtype: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FAMILIES[name] | {"dtype": "bfloat16"}))
    output = tmp_path / "out"
    compile_model(
        config,
        output,
        target=f"cuda:{archs}",
        with_weights=False,
        quant=quant,
        kv_cache_dtype=kv_cache_dtype,
        kv_calibration="passage" if kv_cache_dtype == "fp8" else None,
        progress=False,
    )
    wanted = {exact: room for exact, room in SHARED_BYTES.items() if exact[:5] in archs}
    infos = [json.loads(path.read_text()) for path in output.rglob("kernels/bin/*/*.json")]
    assert {info["arch"] for info in infos} == set(wanted)
    too_large = [_name(i) for i in infos if i["shared_bytes"] > wanted[i["arch"]]]
    assert not too_large
    spilling = [f"{_name(i)}: {i['stack_bytes']} bytes" for i in infos if i["stack_bytes"]]
    assert not spilling
    modules = {path.stem for path in output.rglob("kernels/src/*.py")}
    for arch in wanted:
        assert {i["module"] for i in infos if i["arch"] == arch} == modules, "one was not compiled"


def _name(info: dict[str, Any]) -> str:
    constants = {**info["constants"], **info["options"]}
    return f"{info['module']}.{info['kernel']} for {info['arch']}, {constants}"
