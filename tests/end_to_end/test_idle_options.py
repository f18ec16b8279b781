"""Options of compile that have nothing to do for the model at hand: said, not passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.calibrate.calibrate import Calibration
from octavo.calibrate.plan import CalibrationRequest
from octavo.calibrate.sequences import CalibrationOptions
from octavo.compile import compile_model
from octavo.ir.manifest import Manifest

QUANTIZED = Path(__file__).parents[1] / "frontend" / "data" / "quantized" / "gptq-4bit"
TEXT = Path(__file__).parents[1] / "data" / "as_you_like_it.txt"


def notices(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, **options: Any
) -> list[str]:
    """What compiling says has no effect."""
    caplog.clear()
    compile_model(model, folder, target="cpu", progress=False, **options)
    return [text for text in caplog.messages if "has no effect" in text]


def test_nothing_to_dequantize(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [notice] = notices(tiny_checkpoint, tmp_path / "whole", caplog, dequantize=True)
    assert notice == "--dequantize has no effect: tiny-llama holds nothing quantised"
    assert notices(QUANTIZED, tmp_path / "codes", caplog, dequantize=True) == []
    assert notices(tiny_checkpoint, tmp_path / "plain", caplog) == []


def test_a_loss_that_is_not_measured(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(name: str, model: Path = tiny_checkpoint, **options: Any) -> list[str]:
        return notices(model, tmp_path / name, caplog, **options)

    start = "--loss-tokens has no effect: "
    assert said("whole", loss_tokens=40) == [start + "nothing is quantised"]
    drawn: dict[str, Any] = {"quant": "int8", "random_weights": 0}
    assert said("random", loss_tokens=40, **drawn) == [start + "the weights are random"]
    shapes: dict[str, Any] = {"quant": "int8", "with_weights": False}
    assert said("shapes", loss_tokens=40, **shapes) == [start + "no weights are stored"]
    # The checkpoint has no tokenizer.
    assert said("bare", QUANTIZED, loss_tokens=40) == [start + "the model has no tokenizer"]
    for tokens in (0, None):  # nobody asked
        assert said(f"whole-{tokens}", loss_tokens=tokens, with_weights=False) == []


def test_a_head_can_be_calibrated_alone(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibration = Calibration("gptq", CalibrationOptions(2, 32))
    assert not notices(
        *(tiny_checkpoint, tmp_path / "head", caplog),
        quant_head="int4-g32",
        calibration=CalibrationRequest(TEXT, calibration),
        loss_tokens=0,
    )
    manifest = Manifest.from_json((tmp_path / "head" / "manifest.json").read_text())
    assert manifest.quant_schemes == {"int4<1x32, bf16>": 1}
