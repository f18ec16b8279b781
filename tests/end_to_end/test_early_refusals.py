"""What can be refused without a model is refused before one runs for minutes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.calibrate.calibrate import Calibration
from octavo.calibrate.plan import CalibrationRequest
from octavo.calibrate.sequences import CalibrationOptions
from octavo.compile import compile_model
from octavo.ir.errors import OctavoError

TEXT = Path(__file__).parents[1] / "data" / "as_you_like_it.txt"
GPTQ = Calibration("gptq", CalibrationOptions(4, 64))


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("the model of Hugging Face ran")

    monkeypatch.setattr("octavo.build.check_trace", run)


def refused(model: Path, folder: Path, reason: str, **options: Any) -> None:
    with pytest.raises(OctavoError, match=reason):
        compile_model(model, folder / "artifact", target="cpu", progress=False, **options)
    assert not (folder / "artifact").exists()


@pytest.mark.parametrize(
    "options", [{"quant": "int4"}, {"quant": "int8", "quant_head": "int4-asym-g128"}]
)
def test_a_group_that_does_not_divide_k(
    options: dict[str, str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    refused(tiny_checkpoint, tmp_path, "K=64 is not a multiple of the group of 128", **options)


@pytest.mark.parametrize(
    ("quant", "request_"),
    [
        ("int8", CalibrationRequest(TEXT, GPTQ)),
        ("auto", CalibrationRequest(budget_gb=1.0)),
    ],
    ids=["calibration", "auto"],
)
def test_a_text_for_a_model_without_a_tokenizer(
    quant: str, request_: CalibrationRequest, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    reason = "bare has no tokenizer, .*: add its tokenizer.json"
    refused(bare, tmp_path, reason, quant=quant, calibration=request_)


def test_a_text_without_a_whole_sample(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    request = CalibrationRequest(tmp_path / "short.txt", GPTQ)
    reason = "has 10 tokens, expected at least one sample of 64"
    refused(tiny_checkpoint, tmp_path, reason, quant="int8", calibration=request)


def test_a_budget_that_no_choice_meets(tiny_checkpoint: Path, tmp_path: Path) -> None:
    request = CalibrationRequest(budget_gb=1e-5)
    reason = "--budget-gb 1e-05 cannot be met: the least possible is"
    refused(tiny_checkpoint, tmp_path, reason, quant="auto", calibration=request)


def test_scales_of_the_kv_cache_that_are_not_there(tiny_checkpoint: Path, tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "scales.safetensors")
    options = {"kv_cache_dtype": "fp8", "kv_scales": tmp_path / "scales.safetensors"}
    refused(tiny_checkpoint, tmp_path, "k_scale", **options)


def test_a_pattern_without_a_match_is_said_first(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text("'*.ffn.*': int8\n'*.mlp.*': int8\n")
    with pytest.raises(AssertionError, match="ran"):
        compile_model(
            tiny_checkpoint, tmp_path / "artifact", target="cpu", quant=recipe, progress=False
        )
    assert "'*.ffn.*': no linear answers to this pattern of mixed" in caplog.messages
