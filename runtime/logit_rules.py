"""What one request's parameters do to its logits, kept up to date token by token, on the host."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.grammars import Grammars, Guide
from octavo.runtime.logit_edits import MASK_BITS, LogitEdits, Processor
from octavo.runtime.sampling_params import SamplingParams


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def make_rules(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    tokenizer: Encoder | None,
    vocab_size: int,
    grammars: Grammars,
) -> LogitRules | None:
    """The rules of a request, None when it is sampled from the model's own logits.

    Raises InvalidRequest for structured outputs that make no sense.
    """
    has_any = (
        _has_penalties(params)
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.logits_processors
        or params.structured_outputs
    )
    if not has_any:
        return None
    guide = None if params.structure is None else grammars.guide(params.structure)
    return LogitRules(
        params, prompt_token_ids, tokenizer=tokenizer, vocab_size=vocab_size, guide=guide
    )


class LogitRules:
    """The rules, and what they have to know of the tokens so far.

    ``depends_on_output`` says that a token's edits cannot be told before the token before it is
    known: a request with such rules is never planned ahead of its tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        tokenizer: Encoder | None,
        vocab_size: int,
        guide: Guide | None = None,
    ) -> None:
        self._guide = guide
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._output_token_ids: list[int] = []
        self._penalties = _Penalties(params, prompt_token_ids) if _has_penalties(params) else None
        self._processors = [(p, _wants_prompt(p)) for p in params.logits_processors or ()]
        sequences = bad_word_ids(params.bad_words or (), tokenizer, vocab_size)
        always = [ids[0] for ids in sequences if len(ids) == 1]
        self._always_banned = np.array(sorted(set(always)), dtype=np.int64)
        self._bad_sequences = [ids for ids in sequences if len(ids) > 1]
        bias = params.logit_bias or {}
        self._biased_token_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._allowed: NDArray[np.int32] | None = None
        if params.allowed_token_ids:
            self._allowed = token_mask(params.allowed_token_ids, vocab_size)
        self.depends_on_output = bool(
            self._penalties is not None
            or self._processors
            or self._bad_sequences
            or self._guide is not None
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._guide is not None and self._guide.is_complete

    def check_first(self, banned_token_ids: Sequence[int], vocab_size: int) -> None:
        """Raises InvalidRequest when the rules leave no token to begin with.

        ``banned_token_ids`` may not come first for another reason.
        """
        if self._allowed is None and not len(self._always_banned):
            return  # a bias or a penalty forbids nothing, and a grammar has a beginning
        allowed = self._allowed_next()
        is_left = np.ones(vocab_size, dtype=bool)
        if allowed is not None:
            is_left &= np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocab_size] == 1
        is_left[self._always_banned] = False
        is_left[list(banned_token_ids)] = False
        if not is_left.any():
            raise InvalidRequest(
                "no token may come first: allowed_token_ids, bad_words, min_tokens and "
                "structured_outputs together forbid every one",
                param="bad_words" if self._allowed is None else "allowed_token_ids",
            )

    def append(self, token_id: int) -> None:
        """Take the next token of the output. Raises EngineError if it may not be there."""
        self._output_token_ids.append(token_id)
        if self._penalties is not None:
            self._penalties.append(token_id)
        if self._guide is not None:
            self._guide.append(token_id)

    def edits(self) -> LogitEdits:
        """What to do to the logits of the next token."""
        try:
            allowed = self._allowed_next()
        except EngineError as error:
            return LogitEdits(error=str(error))
        penalties = self._penalties
        if penalties is None:
            return LogitEdits(allowed=allowed, **self._edits_but_penalties())
        token_ids, amounts = penalties.arrays()
        return LogitEdits(
            allowed=allowed,
            **self._edits_but_penalties(),
            repetition_penalty=penalties.repetition,
            penalized_token_ids=token_ids,
            penalties=amounts,
        )

    def _edits_but_penalties(self) -> dict[str, Any]:
        return {
            "processors": tuple(self._bound(*each) for each in self._processors),
            "banned_token_ids": self._banned(),
            "biased_token_ids": self._biased_token_ids,
            "bias": self._bias,
        }

    def _bound(self, processor: Callable[..., Any], wants_prompt: bool) -> Processor:
        output = list(self._output_token_ids)  # its own: what it does to it is nobody's business
        tokens = (self._prompt_token_ids, output) if wants_prompt else (output,)
        bound: Callable[[Tensor], Tensor] = partial(processor, *tokens)
        return bound

    def _allowed_next(self) -> NDArray[np.int32] | None:
        if self._guide is None:
            return self._allowed
        mask = self._guide.mask()
        return mask if self._allowed is None else mask & self._allowed

    def _banned(self) -> NDArray[np.int64]:
        """The last token of each bad word whose other tokens the output ends with."""
        output = self._output_token_ids
        ended = {
            ids[-1] for ids in self._bad_sequences if tuple(output[1 - len(ids) :]) == ids[:-1]
        }
        if not ended:
            return self._always_banned
        return np.array(sorted(ended.union(self._always_banned.tolist())), dtype=np.int64)


class _Penalties:
    """The tokens seen so far, each once, and how often each is in the output."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.repetition = params.repetition_penalty
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._token_ids = array("q")
        self._counts = array("f")
        self._places: dict[int, int] = {}
        if self.repetition != 1.0:  # the only one that looks at the prompt
            for token_id in dict.fromkeys(prompt_token_ids):
                self._add(token_id)

    def append(self, token_id: int) -> None:
        place = self._places.get(token_id)
        self._counts[self._add(token_id) if place is None else place] += 1.0

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The tokens, and what is subtracted from the logit of each."""
        counts = np.array(self._counts, dtype=np.float32)
        amounts = self._frequency * counts + self._presence * (counts > 0.0)
        return np.array(self._token_ids, dtype=np.int64), amounts.astype(np.float32)

    def _add(self, token_id: int) -> int:
        place = self._places[token_id] = len(self._token_ids)
        self._token_ids.append(token_id)
        self._counts.append(0.0)
        return place


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """A bit for each token of the vocabulary: see LogitEdits."""
    bits = np.zeros(-(-vocab_size // MASK_BITS) * MASK_BITS, dtype=bool)
    bits[list(token_ids)] = True
    words: NDArray[np.int32] = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return words


def bad_word_ids(
    words: Sequence[str], tokenizer: Encoder | None, vocab_size: int
) -> list[tuple[int, ...]]:
    """The token sequences that spell a word, at the start of a text and after a space.

    What spells it after a space is left out where it ends with what spells it alone, and so is what
    the model cannot write: a tokenizer may know more tokens than it.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        assert tokenizer is not None, "LLM refuses bad words without a tokenizer"
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        found[bare] = None
        if spaced[-len(bare) :] != bare:
            found[spaced] = None
    return [ids for ids in found if ids and max(ids) < vocab_size]


def _has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def _wants_prompt(processor: Callable[..., Any]) -> bool:
    """Whether it takes the prompt's tokens as well: three arguments rather than two."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except (TypeError, ValueError):  # no signature to be had
        return False
