"""From sampled tokens to what a user sees: text, stops, log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.runtime.detokenizer import IncrementalDetokenizer
from octavo.runtime.errors import EngineError
from octavo.runtime.logit_rules import LogitRules
from octavo.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.runtime.request import Request
from octavo.runtime.sampler import SampledToken, SampleRow, TokenLogprobs
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.stop_strings import StopStrings
from octavo.runtime.tokenizer import Tokenizer

OutputKind = Literal["cumulative", "delta", "final"]


@dataclass(frozen=True)
class Finish:
    """Why a request ended, see CompletionOutput."""

    reason: str
    stop_reason: int | str | None = None


class OutputProcessor:
    """The output side of one request."""

    def __init__(
        self,
        request: Request,
        *,
        prompt: str | None,
        kind: OutputKind,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        arrival_time: float,
        rules: LogitRules | None = None,
        sample_of: tuple[str, int] | None = None,
    ) -> None:
        """``tokenizer`` None means that no text is made; ``kind`` is how often output is shown.

        ``rules`` are told the tokens. ``sample_of`` is the id of the request that this is a sample
        of, and its number.
        """
        params = request.params
        self.request = request
        self.kind = kind
        self.rules = rules
        self.metrics = RequestMetrics(arrival_time)
        self.finish: Finish | None = None
        self._shown_id, self._index = sample_of or (request.request_id, 0)
        self._prompt = prompt
        self._prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._tokenizer = tokenizer
        self._detokenizer = self._make_detokenizer(tokenizer)
        self._stops = StopStrings(
            tuple(params.stop or ()), include_in_output=params.include_stop_str_in_output
        )
        # Text that nobody sees before the end, nor searches, is made at the end.
        self._is_text_deferred = kind == "final" and not params.stop
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * request.num_prompt_tokens
            self._prompt_row_params = SamplingParams(
                temperature=0.0, logprobs=params.prompt_logprobs
            )
        self._cumulative_logprob = 0.0
        self._num_shown_tokens = 0
        self._num_shown_chars = 0

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that would end the request too early, were they the next after the pending one."""
        request = self.request
        if request.num_output_tokens + request.num_pending >= request.params.min_tokens:
            return ()
        return tuple(sorted(self._eos_token_ids | self._stop_token_ids))

    def prompt_rows(self, start: int, stop: int) -> list[SampleRow]:
        """What the logits of prompt tokens ``start`` to ``stop`` are asked: about the next ones."""
        params, request = self._prompt_row_params, self.request
        return [
            SampleRow(params, 0, 0, 0, forced_token_id=request.token_ids[place + 1])
            for place in range(start, stop)
        ]

    def take_prompt_rows(self, start: int, rows: Sequence[SampledToken]) -> None:
        """Take what was asked of prompt tokens from ``start`` on, again or for the first time.

        Raises EngineError when a row has no log-probabilities.
        """
        assert self._prompt_logprobs is not None
        for place, row in enumerate(rows, start=start + 1):
            if row.error is not None:
                raise EngineError(row.error)
            assert row.logprobs is not None
            self._prompt_logprobs[place] = self._entry(row.token_id, row.logprobs)
        self.request.num_prompt_logprobs = max(self.request.num_prompt_logprobs, start + len(rows))

    def append(self, sampled: SampledToken, now: float) -> None:
        """Take the token that the request has just been given; may set ``finish``."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if sampled.logprobs is not None:
            self._append_logprobs(sampled.token_id, sampled.logprobs)
        if self.rules is not None:
            self.rules.append(sampled.token_id)
        finish = self._finish_by_token(sampled.token_id)
        if self._detokenizer is not None:
            is_shown = (
                finish is None
                or not self._is_stop(sampled.token_id, finish)
                or self.request.params.include_stop_str_in_output
            )
            self._append_text(
                self._detokenizer, sampled.token_id if is_shown else None, finish is not None
            )
        if self._stops.matched is not None:
            finish = Finish("stop", self._stops.matched)
        if finish is not None:
            self.end(finish, now)

    def end(self, finish: Finish, now: float) -> None:
        """Record why and when the request ended."""
        self.finish = finish
        if self._is_text_deferred and self._detokenizer is not None:
            self._text = self._detokenizer.flush()
        self.metrics.finished_time = now
        self.metrics.num_preemptions = self.request.num_preemptions

    def output(self) -> RequestOutput | None:
        """What there is to show: for "delta" what is new, for "final" nothing before the end."""
        if self.kind == "final" and self.finish is None:
            return None
        text, logprobs = self._text, self._logprobs
        prompt_logprobs = self._prompt_logprobs
        # What was shown is not copied again: that would make a long answer quadratic.
        first = self._num_shown_tokens if self.kind == "delta" else 0
        token_ids = self.request.token_ids[self.request.num_prompt_tokens + first :]
        if self.kind == "delta":
            self._prompt_logprobs = None  # with the first output only
            logprobs = logprobs[first:]
            text = text[self._num_shown_chars :]
            self._num_shown_tokens = self.request.num_output_tokens
            self._num_shown_chars = len(self._text)
        has_logprobs = self.request.params.logprobs is not None
        completion = CompletionOutput(
            index=self._index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=list(logprobs) if has_logprobs else None,
            finish_reason=self.finish.reason if self.finish else None,
            stop_reason=self.finish.stop_reason if self.finish else None,
        )
        return RequestOutput(
            request_id=self._shown_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[completion],
            finished=self.finish is not None,
            metrics=self.metrics,
            num_cached_tokens=self.request.num_cached_tokens,
        )

    def _make_detokenizer(self, tokenizer: Tokenizer | None) -> IncrementalDetokenizer | None:
        params = self.request.params
        if tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            tokenizer, self.request.token_ids, skip_special_tokens=params.skip_special_tokens
        )

    def _finish_by_token(self, token_id: int) -> Finish | None:
        is_end = token_id in self._eos_token_ids
        if is_end or token_id in self._stop_token_ids:
            if self.request.num_output_tokens >= self.request.params.min_tokens:
                return Finish("stop", None if is_end else token_id)
        if self.rules is not None and self.rules.is_complete:
            return Finish("stop")
        return Finish("length") if self.request.is_at_limit else None

    def _is_stop(self, token_id: int, finish: Finish) -> bool:
        """Whether the token is there only to end the request."""
        is_named = token_id in self._eos_token_ids or token_id in self._stop_token_ids
        return is_named and finish.reason == "stop"

    def _append_text(
        self, detokenizer: IncrementalDetokenizer, token_id: int | None, is_last: bool
    ) -> None:
        if self._is_text_deferred:
            if token_id is not None:
                detokenizer.hold(token_id)
            return
        piece = "" if token_id is None else detokenizer.add(token_id)
        if is_last:
            piece += detokenizer.flush()
        if self.request.num_output_tokens < self.request.params.min_tokens:
            self._text += piece  # too early for a stop string
            return
        self._text += self._stops.feed(piece)
        if is_last:
            self._text += self._stops.flush()

    def _append_logprobs(self, token_id: int, found: TokenLogprobs) -> None:
        self._cumulative_logprob += found.chosen
        self._logprobs.append(self._entry(token_id, found))

    def _entry(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        entry = {token_id: self._logprob(token_id, found.chosen, found.chosen_rank)}
        tops = zip(found.top_token_ids, found.top_logprobs, strict=True)
        for rank, (top_id, value) in enumerate(tops, start=1):
            entry.setdefault(top_id, self._logprob(top_id, value, rank))
        return entry

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.decode([token_id])
        return Logprob(value, rank, text)
