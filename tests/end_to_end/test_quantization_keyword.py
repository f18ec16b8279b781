"""``LLM(quantization=)`` where it states what is so, and where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.compile import compile_model
from octavo.quantization_keyword import settle_quantization
from octavo.runtime.errors import InvalidRequest

DATA = Path(__file__).parents[1] / "frontend" / "data" / "quantized"
METHODS = {
    "gptq-4bit": ("gptq", "gptq_marlin"),
    "awq-gemm": ("awq", "awq_marlin"),
    "ct-w4a16": ("compressed-tensors",),
    "fp8-blocks": ("fp8",),
    "bnb-nf4": ("bitsandbytes",),
    "mxfp4-gpt-oss": ("mxfp4",),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_checkpoint_is_asks_for_nothing(name: str) -> None:
    for method in METHODS[name]:
        assert settle_quantization(DATA / name, method, None) is None


def test_a_checkpoint_that_comes_quantised_runs(tmp_path: Path) -> None:
    llm = LLM(DATA / "gptq-4bit", quantization="gptq", dtype="float32")
    assert list(llm.artifact.manifest.quant_schemes) == ["int4<1x32, f16>"]
    assert llm.artifact.manifest.quantization is None
    [output] = llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    again = LLM(llm.artifact.root, quantization="gptq")
    assert again.artifact.root == llm.artifact.root
    with pytest.raises(InvalidRequest, match="comes quantised by gptq, and quantization='awq'"):
        LLM(llm.artifact.root, quantization="awq")


def test_an_artifact_of_numbers_comes_quantised_by_nothing(tmp_path: Path) -> None:
    artifact = tmp_path / "numbers"
    compile_model(
        DATA / "gptq-4bit", artifact, target="cpu", dequantize=True, loss_tokens=0, progress=False
    )
    with pytest.raises(InvalidRequest, match=r"keeps no codes .*; leave quantization out"):
        LLM(artifact, quantization="gptq")


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("gptq", "'int4'"),
        ("awq_marlin", "'int4'"),
        ("bitsandbytes", "'nf4'"),
        ("compressed-tensors", "'int8-w8a8'"),
    ],
)
def test_a_whole_checkpoint_is_no_quantised_one(
    asked: str, instead: str, tiny_checkpoint: Path, tiny_artifact: Path
) -> None:
    for model in (tiny_checkpoint, tiny_artifact):
        with pytest.raises(InvalidRequest, match=f"or write quantization={instead} for a whole"):
            LLM(model, quantization=asked)


def test_a_gguf_is_told_by_its_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert settle_quantization(tmp_path / "model.gguf", "gguf", None) is None
    with pytest.raises(InvalidRequest, match=r"is no GGUF, .*; give the \.gguf file"):
        settle_quantization(tiny_checkpoint, "gguf", None)


def test_schemes_are_asked_for_where_they_state_nothing(tiny_checkpoint: Path) -> None:
    for asked in ("fp8", "mxfp4", "int8", "int5", "mixed.yaml"):
        assert settle_quantization(tiny_checkpoint, asked, None) == asked
    assert settle_quantization(DATA / "gptq-4bit", "fp8", None) == "fp8"


def test_a_config_of_the_older_kind(tmp_path: Path) -> None:
    body = {"compression_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(body))
    assert settle_quantization(tmp_path, "compressed-tensors", None) is None


def mixed(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


RECIPE = "first.*: none\n'*.q_proj': int8\n'*.mlp.*': int4-g32\n"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    recipe = mixed(folder, "mixed.yaml", RECIPE)
    compile_model(
        *(tiny_checkpoint, folder / "artifact"),
        **{"target": "cpu", "quant": recipe, "quant_head": "int8"},
        loss_tokens=0,
        progress=False,
    )
    return folder / "artifact"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mixed.yaml", RECIPE),
        ("renamed.yaml", RECIPE),
        ("in-full.yaml", RECIPE.replace("int4-g32", "int4<1x32, bf16>")),
        ("with-head.yaml", RECIPE + "lm_head: int4-g64\n"),  # the head that was asked for is first
    ],
)
def test_recipes_that_say_the_same(quantized: Path, tmp_path: Path, name: str, text: str) -> None:
    LLM(quantized, quantization=mixed(tmp_path, name, text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            RECIPE.replace("int4-g32", "int4-g64"),
            r"artifact has '\*\.mlp\.\*': int4<1x32, bf16>, mixed, head int8 has .*int4<1x64,",
        ),
        (RECIPE.partition("'*.mlp")[0], r"int4<1x32, bf16>, mixed, head int8 has no more lines"),
        (RECIPE + "'*.o_proj': int8\n", r"has no more lines, mixed, head int8 has '\*\.o_proj'"),
    ],
)
def test_recipes_of_one_name_that_do_not(
    quantized: Path, tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"compiled with quantization mixed.*{reason}"):
        LLM(quantized, quantization=mixed(tmp_path, "mixed.yaml", text))


def test_the_recipe_of_an_artifact_can_be_used_again(quantized: Path) -> None:
    LLM(quantized, quantization=str(quantized / "ir" / "recipe.yaml"))
