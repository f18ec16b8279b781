"""Beam search: the likeliest continuations of a prompt, several kept at each step.

The search is transformers', with its ``early_stopping=False``: a continuation that ends competes by
the score ``cum_logprob / length ** length_penalty``, and the search is over when the best that
runs, scored at its present length, is no better than the worst of ``beam_width`` that have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.outputs import Logprob
from octavo.runtime.validation import boolean, integer, real

MAX_BEAM_WIDTH = 1024

# From contexts and a number N to the log-probabilities of the N likeliest next tokens of each.
NextLogprobs = Callable[[list[list[int]], int], Sequence[Mapping[int, Logprob]]]


@dataclass
class BeamSearchParams:
    """Parameters of a beam search, in vLLM's shape.

    ``length_penalty`` above 0 favours long continuations; their length is that of the new tokens,
    as in transformers. Nothing is drawn, so ``temperature`` is 0. Raises InvalidRequest.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.beam_width = integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        self.max_tokens = integer("max_tokens", self.max_tokens, low=1)
        boolean("ignore_eos", self.ignore_eos)
        if real("temperature", self.temperature) != 0.0:
            raise InvalidRequest("beam search draws nothing; leave temperature at 0")
        self.length_penalty = real("length_penalty", self.length_penalty, -10.0, 10.0)
        boolean("include_stop_str_in_output", self.include_stop_str_in_output)


@dataclass
class BeamSearchSequence:
    """A continuation. ``tokens`` and ``text`` begin with the prompt, ``logprobs`` after it.

    ``tokens`` end with the end of sequence if it was reached; ``text`` does so only with
    ``include_stop_str_in_output``, and is None without a tokenizer.
    """

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """The ``beam_width`` best continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search from one prompt, one token at a time."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self.running = [BeamSearchSequence(list(prompt_token_ids))]
        self.is_finished = False
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._prompt_length = len(prompt_token_ids)
        self._max_length = min(self._prompt_length + params.max_tokens, max_model_len)
        self._ended: list[tuple[float, BeamSearchSequence]] = []  # best first

    @property
    def num_candidates(self) -> int:
        """Enough that ``beam_width`` go on even if all the others end."""
        return max(2, 1 + len(self._eos_token_ids)) * self._params.beam_width

    def extend(self, logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Go on by one token, given the likeliest next ones of each running continuation."""
        width = self._params.beam_width
        candidates = [
            (beam.cum_logprob + each.logprob, token_id, beam, entry)
            for beam, entry in zip(self.running, logprobs, strict=True)
            for token_id, each in entry.items()
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        grown = [_grown(*candidate) for candidate in candidates[: self.num_candidates]]
        for rank, beam in enumerate(grown):
            self._mark_end(beam)
            # One that ends beyond the best has lost to as many as are kept.
            if beam.finish_reason is not None and rank < width:
                self._ended.append((self._score(beam), beam))
        self._ended.sort(key=lambda ended: ended[0], reverse=True)
        del self._ended[width:]
        self.running = [beam for beam in grown if beam.finish_reason is None][:width]
        self.is_finished = not self.running or self._is_decided()

    def best(self, decode: Callable[[Sequence[int]], str] | None = None) -> BeamSearchOutput:
        """Those that have ended, best first, with their text if there is a tokenizer for it."""
        beams = [beam for _, beam in self._ended]
        if decode is not None:
            for beam in beams:
                beam.text = decode(self._shown(beam))
        return BeamSearchOutput(beams)

    def _shown(self, beam: BeamSearchSequence) -> list[int]:
        has_end = beam.finish_reason == "stop" and not self._params.include_stop_str_in_output
        return beam.tokens[:-1] if has_end else beam.tokens

    def _mark_end(self, beam: BeamSearchSequence) -> None:
        if beam.tokens[-1] in self._eos_token_ids:
            beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
        elif len(beam.tokens) >= self._max_length:
            beam.finish_reason = "length"

    def _is_decided(self) -> bool:
        is_full = len(self._ended) == self._params.beam_width
        return is_full and self._score(self.running[0]) <= self._ended[-1][0]

    def _score(self, beam: BeamSearchSequence) -> float:
        length: float = len(beam.tokens) - self._prompt_length
        return float(beam.cum_logprob / length**self._params.length_penalty)


def search(
    searches: Sequence[BeamSearch],
    next_logprobs: NextLogprobs,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Run several searches side by side to their ends; ``advance`` is called at each one's."""
    while live := [each for each in searches if not each.is_finished]:
        contexts = [beam.tokens for each in live for beam in each.running]
        # The searches share their parameters, and so the number of candidates.
        found = next_logprobs(contexts, live[0].num_candidates)
        at = 0
        for each in live:
            count = len(each.running)
            each.extend(found[at : at + count])
            at += count
            if each.is_finished:
                advance()


def _grown(
    cum_logprob: float, token_id: int, beam: BeamSearchSequence, entry: Mapping[int, Logprob]
) -> BeamSearchSequence:
    return BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, entry], cum_logprob)
