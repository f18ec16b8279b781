"""What Hugging Face answers with SmolLM2 to 20 prompts, and whether a port says the same.

tests/reference/make_smollm2_golden.py wrote it, Hugging Face alone, and measured what each dtype
itself costs (``noise``). A port may differ from float64 by three times that (DESIGN section 8).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.runtime.llm import LLM
from octavo.runtime.outputs import CompletionOutput
from octavo.runtime.sampling_params import SamplingParams

NUM_NEW_TOKENS = 64
NOISE_FACTOR = 3
_PATH = Path(__file__).parent / "reference" / "smollm2_golden.json"


@dataclass(frozen=True)
class Golden:
    """Noise by dtype, and for each prompt 64 greedy tokens with their log-probabilities and the
    margins over the second best."""

    noise: dict[str, float]
    cases: list[dict[str, Any]]

    @classmethod
    def read(cls) -> Golden:
        return cls(**json.loads(_PATH.read_text("utf-8")))

    def limit(self, dtype: str) -> float:
        """How far a port's log-probabilities may be from the reference's."""
        return NOISE_FACTOR * self.noise[dtype]


def check_every_token(llm: LLM, cases: Sequence[dict[str, Any]], limit: float) -> None:
    """Generate for all cases at once, and judge each of their tokens.

    A token may be another where the reference's margin is below the limit. What follows is then no
    longer comparable: the rest is generated anew, from the reference's tokens up to there.
    """
    starts = dict.fromkeys(range(len(cases)), 0)
    while starts:
        prompts = [
            cases[i]["prompt_token_ids"] + cases[i]["token_ids"][:n] for i, n in starts.items()
        ]
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=NUM_NEW_TOKENS - n, ignore_eos=True, logprobs=20
            )
            for n in starts.values()
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ends = {
            i: _first_other(cases[i], n, output.outputs[0], limit)
            for (i, n), output in zip(starts.items(), outputs, strict=True)
        }
        starts = {i: end + 1 for i, end in ends.items() if end + 1 < NUM_NEW_TOKENS}


def _first_other(case: dict[str, Any], start: int, got: CompletionOutput, limit: float) -> int:
    """Where the answer to the prompt and ``start`` tokens first differs; 64 if nowhere."""
    assert len(got.token_ids) == NUM_NEW_TOKENS - start
    assert got.logprobs is not None
    for position in range(start, NUM_NEW_TOKENS):
        where = f"{case['name']}, token {position}"
        token, ours = case["token_ids"][position], got.logprobs[position - start]
        assert token in ours, f"{where}: {token} is not among the 20 likeliest"
        error = abs(ours[token].logprob - case["logprobs"][position])
        assert error <= limit, f"{where}: a log-probability is off by {error:.3g}, not {limit:.3g}"
        if got.token_ids[position - start] != token:
            margin = case["margins"][position]
            assert margin <= limit, f"{where}: not {token}, which is ahead by {margin:.3g}"
            return position
    return NUM_NEW_TOKENS
