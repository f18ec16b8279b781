"""Compiling with a calibration and with a budget, from text to an artifact that runs."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import yaml
from command_line import Command, assert_refused

from octavo.calibrate.plan import CalibrationRequest
from octavo.codegen.artifact import ArtifactWriter
from octavo.compile import compile_model
from octavo.evaluate.evaluate import evaluate
from octavo.evaluate.windows import WindowOptions
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import Manifest

TEXT = Path(__file__).parents[1] / "data" / "as_you_like_it.txt"
OPTIONS = WindowOptions(64, 64, 1280)
SAMPLES = ("--calibration", TEXT, "--calibration-samples", "24", "--calibration-length", "64")


def _manifest(artifact: Path) -> Manifest:
    return Manifest.from_json((artifact / "manifest.json").read_text())


def test_gptq_and_awq_lose_less_than_rounding(
    tiny_checkpoint: Path, tmp_path: Path, octavo_here: Command
) -> None:
    kl = {}
    for method in ("rtn", "gptq", "awq"):
        artifact = tmp_path / method
        with_text = () if method == "rtn" else SAMPLES
        done = octavo_here(
            *(
                "compile",
                tiny_checkpoint,
                "-o",
                artifact,
                "--target",
                "cpu",
                "--loss-tokens",
                "300",
            ),
            *("--quant", "int4-g32", "--quant-method", method, *with_text),
        )
        assert done.returncode == 0, done.stderr
        assert "int4<1x32, bf16>" in _manifest(artifact).quant_schemes
        kl[method] = evaluate(artifact, tiny_checkpoint, options=OPTIONS).loss.kl_mean
        assert json.loads((artifact / "tests" / "loss.json").read_text())["num_tokens"] == 298
        assert "KL divergence" in octavo_here("inspect", artifact).stdout
        assert octavo_here("check", artifact).returncode == 0
        assert not (artifact / "codes").exists()
    assert kl["gptq"] < 0.9 * kl["rtn"]
    assert kl["awq"] < kl["rtn"]


def test_a_budget_leads_to_a_recipe_that_can_be_used_again(
    tiny_checkpoint: Path, tmp_path: Path, octavo_here: Command
) -> None:
    artifact, again = tmp_path / "auto", tmp_path / "again"
    whole = sum(path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors"))
    budget = 0.6 * whole / 1e9
    done = octavo_here(
        *("compile", tiny_checkpoint, "-o", artifact, "--target", "cpu"),
        *("--quant", "auto", "--budget-gb", str(budget), *SAMPLES, "--loss-tokens", "0"),
    )
    assert done.returncode == 0, done.stderr
    recipe = tmp_path / "auto.recipe.yaml"
    chosen = yaml.safe_load(recipe.read_text())
    assert len(set(chosen.values())) > 1
    assert set(_manifest(artifact).quant_schemes) == set(chosen.values()) - {"none"}
    assert "model.layers.1.mlp.down_proj" in done.stdout
    done = octavo_here(
        *("compile", tiny_checkpoint, "-o", again, "--target", "cpu"),
        *("--quant", recipe, *SAMPLES, "--loss-tokens", "0"),
    )
    assert done.returncode == 0, done.stderr
    for manifest in map(_manifest, (artifact, again)):
        stored = [f.size for path, f in manifest.files.items() if path.endswith("safetensors")]
        assert sum(stored) < 0.75 * whole  # with tables of positions, and names
    sizes = [_manifest(path).files["weights/00001.safetensors"] for path in (artifact, again)]
    assert sizes[0] == sizes[1]


def test_a_recipe_is_written_for_a_finished_artifact_only(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: ArtifactWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArtifactWriter, "_move_into_place", full_disk)
    with pytest.raises(OctavoError, match="no space left"):
        compile_model(
            tiny_checkpoint,
            tmp_path / "auto",
            target="cpu",
            quant="auto",
            calibration=CalibrationRequest(budget_gb=1.0),
            loss_tokens=0,
            progress=False,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quant", "int4-g32", "--quant-method", "gptq"), "give --calibration FILE"),
        (("--quant", "auto"), "--budget-gb"),
        (("--quant", "int8", "--budget-gb", "1"), "--quant auto"),
        (("--calibration", TEXT), "say what to quantise to"),
        (("--quant-method", "rtn"), "say what to quantise to"),
        (("--quant", "int8", "--calibration-samples", "128"), "are of a text"),
        (("--quant", "int8", "--calibration-length", "8"), "give --calibration FILE"),
        (("--quant", "auto", "--budget-gb", "1", "--calibration-samples", "8"), "are of a text"),
        (("--quant", "int8", "--calibration", TEXT, "--no-weights"), "leave one of them out"),
        (("--quant", "none", "--calibration", TEXT), "none quantises nothing"),
        (("--quant", "auto", "--budget-gb", "0.00001"), "the least possible is"),
        (("--quant", "auto", "--budget-gb", "nan"), "--budget-gb nan: expected gigabytes"),
        (("--quant", "auto", "--budget-gb", "inf"), "--budget-gb inf: expected gigabytes"),
        (("--quant", "auto", "--budget-gb", "0"), "--budget-gb 0.0: expected gigabytes"),
        (
            ("--quant", "auto", "--budget-gb", "1", "--quant-head", "int8"),
            "add the line `lm_head: int8` to the recipe",
        ),
        (("--quant", "auto", "--budget-gb", "1", "--no-weights"), "leave --no-weights out"),
        (("--quant", "int8", "--act-order"), "codes are chosen by rtn: give --calibration FILE"),
        (("--quant", "int8", "--calibration", "nowhere.txt"), "cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_checkpoint: Path,
    tmp_path: Path,
    octavo_here: Command,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    artifact = tmp_path / "none"
    done = octavo_here("compile", tiny_checkpoint, "-o", artifact, "--target", "cpu", *arguments)
    assert_refused(done, words)
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_does_not_fill_a_sample_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, octavo_here: Command
) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    done = octavo_here(
        *("compile", tiny_checkpoint, "-o", tmp_path / "none", "--target", "cpu"),
        *("--quant", "int8", "--calibration", tmp_path / "short.txt"),
    )
    assert_refused(done, "at least one sample of 256")
