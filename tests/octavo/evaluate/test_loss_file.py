"""The figures that a quantised artifact carries, and how inspect shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command, assert_refused

from octavo.evaluate.evaluate import evaluate
from octavo.evaluate.loss_file import LOSS_FILE, measure_loss
from octavo.evaluate.windows import WindowOptions
from octavo.frontend.source import resolve
from tests.end_to_end.tiny_llama import write_checkpoint


def test_the_file_says_what_an_evaluation_of_the_passage_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.compile import compile_model

    model, artifact = tmp_path / "model", tmp_path / "artifact"
    write_checkpoint(model)
    compile_model(model, artifact, target="cpu", progress=False)
    text = measure_loss(artifact, resolve(model), 70)
    assert text is not None
    body = json.loads(text)
    found = evaluate(artifact, model, options=WindowOptions(256, 256, 70)).loss
    assert body["num_tokens"] == found.num_tokens == 69
    assert body["perplexity"] == found.perplexity
    assert body["kl_mean"] == found.kl_mean

    command = Command(capfd, monkeypatch)
    assert "KL divergence" not in command("inspect", artifact).stdout
    (artifact / LOSS_FILE).write_text(text)
    shown = command("inspect", artifact).stdout
    assert f"{found.perplexity:.4f}" in shown
    assert "KL divergence, mean" in shown
    (artifact / LOSS_FILE).write_text("{}")
    assert_refused(command("inspect", artifact), "tests/loss.json: damaged")
