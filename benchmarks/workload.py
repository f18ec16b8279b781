"""What is run: prompts of random token ids with fixed lengths, so that every run does the same."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One request: prompt ids, and the number of tokens to generate (end-of-sequence ignored)."""

    prompt: list[int]
    new_tokens: int


def single(vocab_size: int) -> list[Job]:
    """One request alone: 64 tokens in, 128 out."""
    return [Job(_ids(random.Random(0), 64, vocab_size), 128)]


def mixed(vocab_size: int) -> list[Job]:
    """16 requests submitted at once: prompts of 16 to 400 tokens, 32 to 128 new tokens.

    Lengths are spread evenly over both ranges and paired by a fixed shuffle.
    """
    rng = random.Random(1)
    prompts = [16 + round(i * (400 - 16) / 15) for i in range(16)]
    news = [32 + round(i * (128 - 32) / 15) for i in range(16)]
    rng.shuffle(prompts)
    rng.shuffle(news)
    return [Job(_ids(rng, p, vocab_size), n) for p, n in zip(prompts, news, strict=True)]


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
