"""The comparison: Hugging Face `generate` with its default (SDPA) attention and dynamic cache."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.bench.results import Decode
from octavo.bench.workload import Job, uniform
from octavo.frontend.source import open_weights, resolve
from octavo.runtime.artifact import Artifact


def load(model: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model with the weights of a checkpoint; never stops at end-of-sequence."""
    source = resolve(model)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(source.config, dtype=dtype)  # type: ignore[no-untyped-call]
    weights = open_weights(source, names)
    built = AutoModelForCausalLM.from_config(source.config, dtype=dtype)  # type: ignore[no-untyped-call]
    state = {key: weights.load(key).to(dtype) for key in weights.keys()}
    built.load_state_dict(state, strict=False)
    return _endless(built)


def of_artifact(artifact: Artifact, device: torch.device) -> Any:
    """The Hugging Face model of an artifact's config.json with random weights: as fast as with
    others, and an artifact without weights will do."""
    config = AutoConfig.from_pretrained(artifact.root / "model")
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(config, dtype=artifact.dtype)  # type: ignore[no-untyped-call]
    return _endless(built)


def _endless(model: Any) -> Any:
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@torch.inference_mode()
def one_by_one(model: Any, jobs: list[Job]) -> None:
    """Each request on its own, one after the other."""
    for job in jobs:
        out = model.generate(
            torch.tensor([job.prompt], device=model.device),
            max_new_tokens=job.new_tokens,
            do_sample=False,
        )
        assert out.shape[1] == len(job.prompt) + job.new_tokens


@torch.inference_mode()
def padded_batch(model: Any, jobs: list[Job]) -> None:
    """All requests as one batch, padded on the left, until the longest is done."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    longest = max(job.new_tokens for job in jobs)
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=longest,
        do_sample=False,
    )
    assert out.shape[1] == width + longest


def measure_decode(
    model: Any, *, batch_size: int, input_len: int, output_len: int, repeats: int = 3
) -> Decode:
    """Decode tokens a second: `generate` shows no steps, so the time for one new token, which is
    the prefill, is taken from the time for all of them."""
    vocab_size = model.config.get_text_config().vocab_size
    short, long = (uniform(batch_size, input_len, n, vocab_size) for n in (1, output_len))
    padded_batch(model, short)  # warm-up
    first = statistics.median(_seconds(model, short) for _ in range(repeats))
    steps = [(_seconds(model, long) - first) / (output_len - 1) for _ in range(repeats)]
    return Decode.of_steps("hugging face", (batch_size, input_len, output_len), steps, first)


def _seconds(model: Any, jobs: list[Job]) -> float:
    start = time.perf_counter()
    padded_batch(model, jobs)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start
