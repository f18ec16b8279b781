"""Models whose keys have much in common keep more of it in an FP8 cache when that is taken off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from command_line import Command, assert_refused
from safetensors.torch import load_file, save_file

from octavo.evaluate.evaluate import evaluate
from octavo.evaluate.windows import WindowOptions
from octavo.runtime.artifact import Artifact
from octavo.runtime.llm import LLM
from octavo.runtime.sampling_params import SamplingParams
from tests.end_to_end.tiny_llama import write_checkpoint
from tests.tolerances import REWRITE

DATA = Path(__file__).parents[1] / "data"
OPTIONS = WindowOptions(128, 128, 1280)
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 of the zoo, with a tokenizer of bytes, whose keys have large biases."""
    folder = tmp_path_factory.mktemp("biased") / "checkpoint"
    write_checkpoint(folder, name="qwen2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor += 6 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def artifacts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By what is said of a calibration: nothing, the passage, or another text."""
    from octavo.compile import compile_model

    folder = tmp_path_factory.mktemp("artifacts")
    texts = {"none": None, "passage": "passage", "other text": DATA / "as_you_like_it.txt"}
    for name, text in texts.items():
        compile_model(
            *(checkpoint, folder / name),
            target="cpu",
            kv_cache_dtype="fp8",
            kv_calibration=text,
            progress=False,
        )
    return {name: folder / name for name in texts}


def test_the_loss_is_less_with_offsets(checkpoint: Path, artifacts: dict[str, Path]) -> None:
    kl = {
        name: evaluate(path, checkpoint, options=OPTIONS).loss.kl_mean
        for name, path in artifacts.items()
    }
    assert kl["passage"] < 0.5 * kl["none"], kl
    assert kl["other text"] < 0.5 * kl["none"], kl


def test_offsets_are_weights_of_the_artifact(
    artifacts: dict[str, Path], octavo_here: Command
) -> None:
    def offsets(name: str) -> dict[str, torch.Tensor]:
        weights = Artifact.open(artifacts[name]).load_weights(torch.device("cpu"))
        return {key: value for key, value in weights.items() if key.endswith("k_offset")}

    found = offsets("passage")
    assert len(found) == LAYERS
    assert {tuple(offset.shape) for offset in found.values()} == {(KV_HEADS, HEAD_DIM)}
    assert all(bool(offset.any()) for offset in found.values())
    assert not offsets("none"), "what is not asked for costs nothing"
    for name, said in {"passage": ", keys with an offset in 2 of 2\n", "none": "\n"}.items():
        assert f"f8e4m3 head{said}" in octavo_here("inspect", artifacts[name]).stdout


def test_a_prompt_in_chunks_says_what_it_says_at_once(artifacts: dict[str, Path]) -> None:
    """What a step wrote it reads as later steps do: all of them without the offset."""
    prompt = list(range(3, 60))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    rows = []
    for options in ({}, {"long_prefill_token_threshold": 7}):
        llm = LLM(artifacts["passage"], check_invariants=True, **options)
        answer = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0]
        chosen = zip(answer.token_ids, answer.logprobs or (), strict=True)
        rows.append([(token, found[token].logprob) for token, found in chosen])
    for (token, logprob), (other, expected) in zip(*rows, strict=True):
        assert token == other
        assert abs(logprob - expected) <= 100 * REWRITE[torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fp8", "--kv-calibration", "nowhere.txt"), "no such file; expected a UTF-8 text, or"),
        (("int8", "--kv-calibration", __file__), "only keys of FP8 have offsets"),
        (("auto", "--kv-calibration", "passage"), "no scales and no offsets"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(
    options: tuple[str, ...],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    octavo_here: Command,
) -> None:
    given = ("compile", checkpoint, "-o", tmp_path / "out", "--target", "cpu")
    assert_refused(octavo_here(*given, "--kv-cache-dtype", *options), message)
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_refused(
    checkpoint: Path, tmp_path: Path, octavo_here: Command
) -> None:
    (tmp_path / "short.txt").write_text("To be, or not.")
    given = ("compile", checkpoint, "-o", tmp_path / "out", "--target", "cpu")
    options = ("--kv-cache-dtype", "fp8", "--kv-calibration", tmp_path / "short.txt")
    assert_refused(
        octavo_here(*given, *options), "tokens, expected at least 256; give a longer text"
    )


def test_without_a_tokenizer_there_are_no_offsets(
    checkpoint: Path,
    tmp_path: Path,
    octavo_here: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(checkpoint, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    given = ("compile", tmp_path / "bare", "-o", tmp_path / "out", "--target", "cpu")
    done = octavo_here(*given, "--kv-cache-dtype", "fp8", "--kv-calibration", "passage")
    assert done.returncode == 0, done.stderr
    assert "has no tokenizer" in caplog.text
    weights = Artifact.open(tmp_path / "out").load_weights(torch.device("cpu"))
    assert not any(key.endswith("k_offset") for key in weights)
