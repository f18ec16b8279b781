"""What is compared with what: refused before anything runs, or said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_refused
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.evaluate import comparable
from octavo.evaluate.evaluate import evaluate
from octavo.evaluate.models import HuggingFaceModel
from octavo.evaluate.windows import WindowOptions
from octavo.frontend.source import resolve
from octavo.ir.errors import OctavoError

SHORT = WindowOptions(32, 32, 64)


def other_model(model: Path, folder: Path, **changes: Any) -> Path:
    """A model with other settings, and the tokenizer of the first."""
    config = AutoConfig.from_pretrained(model)
    for name, value in changes.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a model ran")

    monkeypatch.setattr(HuggingFaceModel, "logits", run)
    monkeypatch.setattr("octavo.evaluate.models.WindowLogits", run)


@pytest.mark.usefixtures("_nothing_runs")
def test_vocabularies_of_other_sizes(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, octavo_here: Command
) -> None:
    larger = other_model(tiny_checkpoint, tmp_path / "larger", vocab_size=300)
    done = octavo_here("evaluate", tiny_artifact, "--against", larger)
    assert_refused(done, "different vocabularies: 260 and 300 tokens", "give --against a model")


def swap_letters(folder: Path) -> None:
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text("utf-8"))
    ids = body["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(body), "utf-8")


@pytest.mark.usefixtures("_nothing_runs")
def test_other_tokens_of_the_same_number(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, octavo_here: Command
) -> None:
    other = other_model(tiny_checkpoint, tmp_path / "other")
    swap_letters(other)
    a = json.loads((tiny_checkpoint / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]["a"]
    done = octavo_here("evaluate", tiny_artifact, "--against", other)
    assert_refused(done, f"token {a} is 'a' in the one and 'b' in the other")


def test_a_vocabulary_with_names_for_more_of_its_ids_is_the_same(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    """As a GGUF fills it up; and a tuning renames tokens that were added."""
    folder = tmp_path / "tuned"
    shutil.copytree(tiny_checkpoint, folder)
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text("utf-8"))
    body["added_tokens"][-1]["content"] = "<|renamed|>"
    path.write_text(json.dumps(body), "utf-8")
    (folder / "tokenizer_config.json").write_text("{}")
    assert evaluate(tiny_artifact, folder, options=SHORT).loss.top1_agreement == 1.0


def test_another_architecture_is_compared_and_said(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smaller = other_model(tiny_checkpoint, tmp_path / "smaller", num_hidden_layers=1)
    assert evaluate(tiny_artifact, smaller, options=SHORT).loss.num_tokens == 62
    [notice] = caplog.messages
    assert "is a llama of num_hidden_layers 2, hidden_size 64, smaller is a llama of" in notice
    assert "num_hidden_layers 1, hidden_size 64: the figures tell two models apart" in notice
    caplog.clear()
    evaluate(tiny_artifact, tiny_checkpoint, options=SHORT)
    assert caplog.messages == []


@pytest.mark.usefixtures("_nothing_runs")
def test_the_context_is_within_both(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    from octavo.compile import compile_model

    short = other_model(tiny_checkpoint, tmp_path / "short", max_position_embeddings=48)
    options = WindowOptions(64, 64)
    with pytest.raises(OctavoError, match="short takes at most 48; choose --context 48 or less"):
        evaluate(tiny_artifact, short, options=options)
    compiled = tmp_path / "compiled"
    compile_model(short, compiled, target="cpu", with_weights=False, progress=False)
    with pytest.raises(OctavoError, match=r"compiled takes at most 48; choose --context 48"):
        evaluate(tiny_artifact, compiled, options=options)


def test_a_model_without_a_tokenizer_has_no_tokens_to_compare(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert comparable.identify_source(resolve(bare)).tokens is None
    tokens = comparable.identify_source(resolve(tiny_checkpoint)).tokens
    assert tokens is not None
    assert len(tokens) == 256  # the bytes, without the four that were added


@pytest.mark.parametrize("where", [".", "config.json"])
def test_a_config_is_no_reference(
    where: str, tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, octavo_here: Command
) -> None:
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    done = octavo_here("evaluate", tiny_artifact, "--against", tmp_path / where)
    assert_refused(done, "there is nothing to compare with; give --against a model directory")
    assert "--random-weights" not in done.stderr
