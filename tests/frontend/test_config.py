"""Configs that are refused, each with one line that names the trouble; dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.frontend.config import choose_dtype, read_config
from octavo.ir.errors import OctavoError
from tests.frontend.conftest import tiny_config

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "no model_type"),
        ([], "expected a JSON object, got a list"),
        (
            {"model_type": "llamma"},
            rf"'llamma' is unknown to transformers {transformers.__version__}; upgrade",
        ),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map.*does not run"),
        ({"model_type": "bert"}, "encoder-only"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model class"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "hqq", "bits": 4}},
            r"quant_method hqq is not supported \(supported: gptq, awq, .*, and GGUF files\)",
        ),
        ({**LLAMA, "quantization_config": {}}, "quant_method unknown is not supported"),
        ({**LLAMA, "hidden_size": "wide"}, "transformers refuses it"),
    ],
)
def test_refused_in_one_line(tmp_path: Path, raw: Any, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(OctavoError, match=message) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(OctavoError, match="is not JSON"):
        read_config(path)


def test_auto_map_of_a_known_model_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "auto_map": {"AutoConfig": "x.Y"}}))
    assert read_config(path).model_type == "llama"


@pytest.mark.parametrize(
    ("requested", "stated", "target", "expected"),
    [
        ("auto", None, "cpu", torch.float32),
        ("auto", "float32", "cpu", torch.float32),
        ("auto", "bfloat16", "cpu", torch.bfloat16),
        ("auto", "float16", "cpu", torch.float32),
        ("bfloat16", "float32", "cpu", torch.bfloat16),
        ("float32", "bfloat16", "cpu", torch.float32),
        ("auto", None, "cuda:sm_90", torch.bfloat16),
        ("auto", "float32", "cuda:sm_90", torch.bfloat16),
        ("auto", "float16", "cuda:sm_80", torch.float16),
        ("float16", "bfloat16", "cuda:sm_80", torch.float16),
    ],
)
def test_dtype(requested: str, stated: str | None, target: str, expected: torch.dtype) -> None:
    config = tiny_config("llama", dtype=stated)
    assert choose_dtype(requested, config, target) == expected


@pytest.mark.parametrize(
    ("requested", "message"),
    [("float16", "not offered by the cpu target"), ("fp8", "'fp8' is unknown; choose auto")],
)
def test_dtype_refused(requested: str, message: str) -> None:
    with pytest.raises(OctavoError, match=message):
        choose_dtype(requested, tiny_config("llama"), "cpu")
