"""What Hugging Face says, and how far a port may be from it: DESIGN section 8, in one place.

The reference is the Hugging Face model itself, eager, in float64. ``noise`` is the largest
difference between its log-probabilities and those of the same model run in the dtype under test:
what that dtype itself costs. A port is right when

- its log-probabilities are within ``NOISE_FACTOR`` times the noise of the reference, and
- each token is the reference's likeliest, unless the reference's margin is below that as well.

A token is judged on the prefix that the port has written, so that one tie does not hide the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

NOISE_FACTOR = 3


class HFReference:
    """The Hugging Face model of a directory, in a dtype and in float64.

    ``noise`` is measured on ``prompts``, each followed by ``num_new_tokens`` greedy tokens.
    ``new_cache`` makes the KV cache of a text, where one has a part in what the model says.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        prompts: Sequence[Sequence[int]],
        num_new_tokens: int,
        new_cache: Callable[[], Any] | None = None,
    ) -> None:
        self._new_cache = new_cache
        self._narrow = _load(directory, dtype)
        self._exact = _load(directory, torch.float64)
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self.prompts = [list(prompt) for prompt in prompts]
        self.answers = [self._greedy(prompt, num_new_tokens) for prompt in self.prompts]

    @cached_property
    def noise(self) -> float:
        """The largest error of a log-probability that the dtype costs Hugging Face itself."""
        texts = [p + a for p, a in zip(self.prompts, self.answers, strict=True)]
        narrow = [logprobs_of(self._narrow, text, self._new_cache) for text in texts]
        return max(
            float((got - self.logprobs(text)).abs().max())
            for got, text in zip(narrow, texts, strict=True)
        )

    @property
    def limit(self) -> float:
        """How far a port's log-probabilities may be from the reference's."""
        return NOISE_FACTOR * self.noise

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """``f64[len(ids), vocab]``: what follows each token, kept for the next who asks."""
        key = tuple(ids)
        if key not in self._rows:
            self._rows[key] = logprobs_of(self._exact, ids, self._new_cache)
        return self._rows[key]

    def decisive(self) -> float:
        """The share of greedy tokens that a port has to hit: their margin is above the limit."""
        texts = zip(self.prompts, self.answers, strict=True)
        rows = torch.cat([self.logprobs(p + a)[len(p) - 1 : -1] for p, a in texts])
        best = rows.topk(2).values
        return float((best[:, 0] - best[:, 1] > self.limit).double().mean())

    def check_rows(self, ids: Sequence[int], logits: Tensor, where: str) -> None:
        """Assert that ``logits`` ``[len(ids), vocab]`` say what the reference says."""
        got = logits.double().log_softmax(-1)
        want = self.logprobs(ids)
        assert got.shape == want.shape, f"{where}: {tuple(got.shape)}, not {tuple(want.shape)}"
        self._check_close(got, want, where)

    def check_continuation(
        self, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Tensor, where: str
    ) -> None:
        """Assert that greedy ``token_ids`` with their ``logprobs`` ``[n, vocab]`` are right."""
        rows = self.logprobs([*prompt, *token_ids])[len(prompt) - 1 : -1]
        self._check_close(logprobs.double(), rows, where)
        for position, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
            behind = float(row.max() - row[token])
            assert behind <= self.limit, (
                f"{where}: token {position} is {token}, Hugging Face prefers {int(row.argmax())} "
                f"by {behind:.3g}, more than {self.limit:.3g}"
            )

    def _check_close(self, got: Tensor, want: Tensor, where: str) -> None:
        worst = float((got - want).abs().max())
        # Not `worst > limit`: a NaN has to fail.
        assert worst <= self.limit, (
            f"{where}: log-probabilities differ by {worst:.3g}, at most {self.limit:.3g} expected"
        )

    def _greedy(self, prompt: list[int], num_new_tokens: int) -> list[int]:
        """Greedy tokens of the dtype under test, through Hugging Face's own cache."""
        self._narrow.generation_config.eos_token_id = None
        output = self._narrow.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=num_new_tokens
        )
        return output[0, len(prompt) :].tolist()


def _load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    # From the directory, not by `.to(dtype)`: that would round rotary frequencies as well.
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def logprobs_of(
    model: PreTrainedModel, ids: Sequence[int], new_cache: Callable[[], Any] | None
) -> Tensor:
    """``f64[len(ids), vocab]``: what follows each token."""
    cache = {} if new_cache is None else {"cache": new_cache()}
    given = {"input_ids": torch.tensor([list(ids)]), "use_cache": bool(cache), **cache}
    logits = model(**given).logits[0]
    return logits.double().log_softmax(-1)
