"""Quantised checkpoints, compiled for the CPU, say what Hugging Face says with their numbers.

The numbers are those that the library of each format reads (tests/frontend/test_quantized.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.codegen.cpu_rules import quant_kernel
from octavo.compile import compile_model
from octavo.frontend.config import read_config
from octavo.frontend.source import open_weights, resolve
from octavo.ir.quant_scheme import QuantScheme
from octavo.llm import LLM
from octavo.runtime.artifact import Artifact
from octavo.runtime.sampling_params import SamplingParams
from tests.frontend.gguf_files import random_rows, write_gguf
from tests.frontend.quantized_checkpoints import DATA

PROMPT, NEW = [5, 17, 40, 3, 63, 61, 8], 6
# Of each family one; the others take the same ways.
QUICK = {
    "awq-gemm": "uint4<1x32, f16, zero=u8>",
    "bnb-nf4-double": "nf4<1x64, f32>",
    "ct-fp8-block": "f8e4m3<48x48, bf16, x=f8e4m3/128>",
    "ct-w8a8-int": "int8<1x*, bf16, x=i8>",
    "fp8-blocks": "f8e4m3<128x128, f32, x=f8e4m3/128>",
    "gptq-4bit-act-order": "uint4<1x32, f16, zero=u8>",
}
SLOW = {
    "bnb-int8": "int8<1x*, f32>",
    "bnb-nf4": "nf4<1x64, f32>",
    "ct-fp8-channel": "f8e4m3<1x*, bf16, x=f8e4m3>",
    "ct-fp8-tensor": "f8e4m3<*x*, bf16, x=f8e4m3>",
    "ct-w4a16": "int4<1x32, bf16>",
    "ct-w4a16-zeros": "uint4<1x32, bf16, zero=u8>",
    "ct-w8a16": "int8<1x*, bf16>",
    "ct-w8a16-zeros": "uint8<1x*, bf16, zero=u8>",
    "fp8-tensor": "f8e4m3<*x*, f32, x=f8e4m3>",
    "gptq-4bit": "int4<1x32, f16>",
    "gptq-8bit": "int8<1x*, f16>",
    "gptq-8bit-zeros": "uint8<1x32, f16, zero=u8>",
    "gptq-v2-4bit": "uint4<1x64, f16, zero=u8>",
}
CHECKPOINTS = [
    *(pytest.param(name, scheme, id=name) for name, scheme in QUICK.items()),
    *(pytest.param(name, scheme, id=name, marks=pytest.mark.slow) for name, scheme in SLOW.items()),
]
GGUF_SCHEMES = {
    "Q4_0": "int4<1x32, f16>",
    "Q4_1": "uint4<1x32, f16, offset=f16>",
    "Q8_0": "int8<1x32, f16>",
    "Q4_K": "uint4<1x32, f32, offset=f32>",
    "Q5_K": "uint5<1x32, f32, offset=f32>",
    "Q6_K": "int6<1x16, f32>",
}
GGUF_TYPES = [
    *(pytest.param(name, id=name) for name in ("Q4_1", "Q6_K")),
    *(pytest.param(n, id=n, marks=pytest.mark.slow) for n in ("Q4_0", "Q8_0", "Q4_K", "Q5_K")),
]


def hf_model(source: Path) -> Any:
    """Hugging Face's model in float64, with the numbers that the checkpoint stands for."""
    found = resolve(source)
    model = AutoModelForCausalLM.from_config(
        found.config, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    weights = open_weights(found, model)
    model.load_state_dict({key: weights.load(key).double() for key in model.state_dict()})
    return model


@torch.inference_mode()
def hf_logprobs(model: Any, ids: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def agrees_with_hugging_face(source: Path, artifact: Path, scheme: str) -> None:
    """Log-probabilities of a greedy answer, within the noise of the narrowest type of a kernel."""
    exact = hf_model(source)
    parsed = QuantScheme.parse(scheme)
    # Groups of int8 are multiplied as two matrices of 4 bits, in bf16 as these are.
    is_narrow = quant_kernel(parsed)[0] == "quant_linear_int4" or parsed.x == "i8"
    narrow = torch.bfloat16 if is_narrow else torch.float32
    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=5, ignore_eos=True)
    answer = LLM(artifact).generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
    text = [*PROMPT, *answer.token_ids]
    want = hf_logprobs(exact, text)[len(PROMPT) - 1 : -1]
    rounded = hf_logprobs(exact.to(narrow), text)[len(PROMPT) - 1 : -1]
    noise = float((rounded - want).abs().max())
    for row, found in zip(want, answer.logprobs, strict=True):
        for token, logprob in found.items():
            assert abs(logprob.logprob - float(row[token])) <= 3 * noise


@pytest.mark.parametrize(("name", "scheme"), CHECKPOINTS)
def test_a_checkpoint_keeps_its_codes(name: str, scheme: str, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    compile_model(DATA / name, artifact, dtype="float32", target="cpu", progress=False)
    # Merged: qkv, o, gate and up, down. Blocks of several rows, or of all, may not be stacked.
    counts = Artifact.open(artifact).manifest.quant_schemes
    assert counts.keys() == {scheme}
    agrees_with_hugging_face(DATA / name, artifact, scheme)


def test_a_recipe_for_what_is_quantised_already(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, options in {"kept": {}, "rounded": {"dequantize": True}}.items():
        caplog.clear()
        artifact = tmp_path / name
        compile_model(
            DATA / "gptq-4bit", artifact, target="cpu", quant="int8", progress=False, **options
        )
        [scheme] = Artifact.open(artifact).manifest.quant_schemes
        is_kept = name == "kept"
        assert scheme == ("int4<1x32, f16>" if is_kept else "int8<1x*, f32>")
        assert ("int8 leaves 4 linears as they are" in caplog.text) == is_kept


def test_a_checkpoint_read_as_numbers(tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    source = DATA / "gptq-4bit-act-order"
    compile_model(source, artifact, dtype="float32", target="cpu", dequantize=True, progress=False)
    assert Artifact.open(artifact).manifest.quant_schemes == {}
    agrees_with_hugging_face(source, artifact, "f8e4m3<1x*, f32>")  # as exact as float32 is


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_a_gguf_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    """Rows as wide as a block of the K types; the tied head has codes too."""
    config = read_config(DATA / "gptq-4bit" / "config.json").to_dict()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model_type = config.pop("model_type")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**config, **sizes}), dtype=torch.float32
    )
    path = tmp_path / "m.gguf"
    deviation = 0.06 / {"Q8_0": 73, "Q4_K": 150, "Q5_K": 300, "Q6_K": 1000}.get(kind, 5)
    write_gguf(
        path,
        model,
        quantize=GGMLQuantizationType[kind],
        pack=lambda matrix, type_: random_rows(type_, *matrix.shape, deviation=deviation),
    )
    artifact = tmp_path / "artifact"
    compile_model(path, artifact, dtype="float32", target="cpu", progress=False)
    assert Artifact.open(artifact).manifest.quant_schemes == {GGUF_SCHEMES[kind]: 5}
    agrees_with_hugging_face(path, artifact, GGUF_SCHEMES[kind])
