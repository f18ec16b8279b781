"""One computation, and the equal requests that it answers, each in the shape that it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.runtime.sampling_params import SamplingParams


@dataclass
class _Shown:
    """What a request has been shown of one continuation."""

    num_tokens: int = 0
    num_chars: int = 0
    is_finished: bool = False
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class Sharer:
    """A request that gets its outputs from those of another.

    All that it is given is its own, so that whoever changes it changes nobody else's.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        kind: OutputKind,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.arrival_time = arrival_time
        self.is_first = False  # what is computed is computed for it
        self._prompt = prompt
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._kind = kind
        self._shown: dict[int, _Shown] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def output(self, whole: RequestOutput) -> RequestOutput | None:
        """What it has to show when there is ``whole``, the cumulative output of the computation."""
        if self._kind == "final" and not whole.finished:
            return None
        completions = [self._completion(each) for each in whole.outputs]
        prompt_logprobs = self._prompt_logprobs_of(whole)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            outputs=[each for each in completions if each is not None],
            finished=whole.finished,
            metrics=self._metrics(whole.metrics),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=(
                whole.num_cached_tokens if self.is_first else len(self._prompt_token_ids)
            ),
        )

    def _completion(self, whole: CompletionOutput) -> CompletionOutput | None:
        """All of it or, for "delta", what is new; None when nothing is."""
        shown = self._shown.setdefault(whole.index, _Shown())
        is_delta = self._kind == "delta"
        first_token = shown.num_tokens if is_delta else 0
        first_char = shown.num_chars if is_delta else 0
        is_new = len(whole.token_ids) > first_token or whole.finished() > shown.is_finished
        if is_delta and not is_new:
            return None
        if whole.logprobs is not None:
            shown.logprobs += map(dict, whole.logprobs[len(shown.logprobs) :])
        shown.num_tokens, shown.num_chars = len(whole.token_ids), len(whole.text)
        shown.is_finished = whole.finished()
        return replace(
            whole,
            text=whole.text[first_char:],
            token_ids=whole.token_ids[first_token:],
            logprobs=None if whole.logprobs is None else shown.logprobs[first_token:],
        )

    def _prompt_logprobs_of(self, whole: RequestOutput) -> list[dict[int, Logprob] | None] | None:
        """With the first output only for "delta", as the engine has it."""
        found = whole.prompt_logprobs
        if found is None or (self._kind == "delta" and self._prompt_logprobs is not None):
            return None
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None if each is None else dict(each) for each in found]
        return self._prompt_logprobs

    def _metrics(self, metrics: RequestMetrics | None) -> RequestMetrics | None:
        """For this request nothing was before its arrival."""
        if metrics is None:
            return None
        start = self.arrival_time
        return RequestMetrics(
            arrival_time=start,
            first_scheduled_time=_not_before(start, metrics.first_scheduled_time),
            first_token_time=_not_before(start, metrics.first_token_time),
            last_token_time=_not_before(start, metrics.last_token_time),
            finished_time=_not_before(start, metrics.finished_time),
            num_preemptions=metrics.num_preemptions,
        )


class Computation:
    """What the engine computes under ``request_id``, for one request or more."""

    def __init__(
        self, request_id: str, key: bytes, params: SamplingParams, priority: int, first: Sharer
    ) -> None:
        first.is_first = True
        self.request_id = request_id
        self.key: bytes | None = key  # None when its answer is not to be stored
        self.priority = priority
        self.sharers = {first.request_id: first}
        self._params = params
        self._completions: dict[int, CompletionOutput] = {}
        self._newest = RequestOutput(request_id, None, [])

    def take(self, output: RequestOutput) -> RequestOutput:
        """All there is of the answer when the engine gives ``output``."""
        self._completions.update((each.index, each) for each in output.outputs)
        if output.prompt_logprobs is None:
            output = replace(output, prompt_logprobs=self._newest.prompt_logprobs)
        completions = [self._completions[index] for index in sorted(self._completions)]
        self._newest = replace(output, outputs=completions)
        return self._newest

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """Let one request go, and give its last output; the computation goes on."""
        ended = [
            each if each.finished() else replace(each, finish_reason="abort")
            for each in map(self._completion, range(self._params.n))
        ]
        sharer = self.sharers.pop(request_id)
        metrics = self._newest.metrics or RequestMetrics(sharer.arrival_time)
        return sharer.output(
            replace(
                self._newest,
                outputs=ended,
                finished=True,
                metrics=replace(metrics, finished_time=now),
            )
        )

    def _completion(self, index: int) -> CompletionOutput:
        if index in self._completions:
            return self._completions[index]
        if self._params.logprobs is None:
            return CompletionOutput(index, "", [])
        return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])


def _not_before(start: float, time: float | None) -> float | None:
    return None if time is None else max(start, time)
