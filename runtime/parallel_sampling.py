"""Several samples of one prompt: requests of their own to the scheduler, one to the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.runtime.sampling_params import SamplingParams

_WHOLE = ("stop", "length")


class ParallelSampling:
    """The ``best_of`` or ``n`` requests of one, and what is shown of them under its id.

    With ``best_of`` above n nothing is shown before the end: then the n samples of the highest
    cumulative log-probability, best first, those that failed last.
    """

    def __init__(self, request_id: str, params: SamplingParams, kind: OutputKind) -> None:
        count = params.best_of or params.n
        self.request_id = request_id
        self.is_ranked = count > params.n
        self.kind: OutputKind = "final" if self.is_ranked else kind
        self.sample_ids = [f"{request_id}#{index}" for index in range(count)]
        # A rank needs the log-probability of the chosen tokens, whether or not they are shown.
        hidden = 0 if self.is_ranked and params.logprobs is None else params.logprobs
        self._sample_params = replace(params, n=1, best_of=None, logprobs=hidden)
        self._params = params
        self._num_running = count
        self._samples: dict[int, CompletionOutput] = {}
        self._metrics: dict[int, RequestMetrics] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def params_of(self, index: int) -> SamplingParams:
        """The parameters of one sample. The prompt is the same for all: one is asked about it."""
        return replace(self._sample_params, prompt_logprobs=None) if index else self._sample_params

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return self._num_running == 0

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """What there is to show when one sample has ``output``."""
        [sample] = output.outputs
        self._samples[sample.index] = sample
        if output.metrics is not None:
            self._metrics[sample.index] = output.metrics
        self._num_running -= output.finished
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if self.kind == "final" and not self.is_finished:
            return None
        is_delta = self.kind == "delta"
        return replace(
            output,
            outputs=[sample] if is_delta else self._shown(),
            finished=self.is_finished,
            metrics=self._merged_metrics(),
            prompt_logprobs=output.prompt_logprobs if is_delta else self._prompt_logprobs,
        )

    def _shown(self) -> list[CompletionOutput]:
        samples = [self._samples[index] for index in sorted(self._samples)]
        if not self.is_ranked:
            return samples
        ranked = sorted(samples, key=_rank, reverse=True)[: self._params.n]
        has_logprobs = self._params.logprobs is not None
        return [
            replace(sample, index=index, logprobs=sample.logprobs if has_logprobs else None)
            for index, sample in enumerate(ranked)
        ]

    def _merged_metrics(self) -> RequestMetrics:
        each = self._metrics.values()
        begun = [m.first_scheduled_time for m in each if m.first_scheduled_time is not None]
        first = [m.first_token_time for m in each if m.first_token_time is not None]
        ended = [m.finished_time for m in each if m.finished_time is not None]
        return RequestMetrics(
            arrival_time=min(m.arrival_time for m in each),
            first_scheduled_time=min(begun, default=None),
            first_token_time=min(first, default=None),
            finished_time=max(ended) if self.is_finished else None,
            num_preemptions=sum(m.num_preemptions for m in each),
        )


def join_outputs(outputs: Sequence[RequestOutput | None]) -> RequestOutput | None:
    """One request's outputs that came at once, as one: the newest of each sample."""
    given = [output for output in outputs if output is not None]
    if not given:
        return None
    newest = {sample.index: sample for output in given for sample in output.outputs}
    return replace(given[-1], outputs=[newest[index] for index in sorted(newest)])


def _rank(sample: CompletionOutput) -> tuple[bool, float]:
    return sample.finish_reason in _WHOLE, sample.cumulative_logprob or 0.0
