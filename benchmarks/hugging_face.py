"""The comparison: Hugging Face `generate` with its default (SDPA) attention and dynamic cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workload import Job
from octavo.frontend.source import open_weights, resolve


def load(model: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model with the weights of a checkpoint; never stops at end-of-sequence."""
    source = resolve(model)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(source.config, dtype=dtype)
    weights = open_weights(source, names)
    built = AutoModelForCausalLM.from_config(source.config, dtype=dtype)
    state = {key: weights.load(key).to(dtype) for key in weights.keys()}
    built.load_state_dict(state, strict=False)
    built.tie_weights()
    built.generation_config.eos_token_id = None
    built.generation_config.pad_token_id = 0
    return built.eval()


@torch.inference_mode()
def one_by_one(model: Any, jobs: list[Job]) -> None:
    """Each request on its own, one after the other."""
    for job in jobs:
        out = model.generate(
            torch.tensor([job.prompt]), max_new_tokens=job.new_tokens, do_sample=False
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
    out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
    assert out.shape[1] == width + longest
