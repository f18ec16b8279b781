"""What is run: prompts of random token ids with fixed lengths, so that every run does the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.ir.errors import OctavoError


@dataclass(frozen=True)
class Job:
    """One request: prompt ids, and the number of tokens to generate (end-of-sequence ignored)."""

    prompt: list[int]
    new_tokens: int


def single(vocab_size: int) -> list[Job]:
    """One request alone: 64 tokens in, 128 out."""
    return uniform(1, 64, 128, vocab_size)


def mixed(vocab_size: int) -> list[Job]:
    """16 requests submitted at once: prompts of 16 to 400 tokens, 32 to 128 new tokens.

    Lengths are spread evenly over both ranges and paired by a fixed shuffle.
    """
    rng = random.Random(1)
    prompts = [16 + round(i * (400 - 16) / 15) for i in range(16)]
    news = [32 + round(i * (128 - 32) / 15) for i in range(16)]
    rng.shuffle(prompts)
    rng.shuffle(news)
    return of_lengths(list(zip(prompts, news, strict=True)), vocab_size, seed=1)


def uniform(count: int, input_len: int, output_len: int, vocab_size: int) -> list[Job]:
    """So many requests of the same lengths, each with other ids."""
    return of_lengths([(input_len, output_len)] * count, vocab_size)


def of_lengths(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int = 0) -> list[Job]:
    """A request for each pair of prompt length and number of new tokens."""
    rng = random.Random(seed)
    return [Job([rng.randrange(vocab_size) for _ in range(p)], n) for p, n in lengths]


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """A JSON list of ``[prompt length, number of new tokens]``. Raises OctavoError for others."""
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OctavoError(f"{path} is not JSON: {error}") from None
    expected = "expected a list of [prompt length, output length], both at least 1"
    if not isinstance(pairs, list) or not pairs:
        raise OctavoError(f"{path}: {expected}")
    for index, pair in enumerate(pairs):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(type(n) is int and n >= 1 for n in pair):
            raise OctavoError(f"{path}: {expected}; entry {index} is {pair!r:.60}")
    return [(prompt, new) for prompt, new in pairs]
