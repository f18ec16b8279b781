"""What a user gets back, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from octavo.runtime.histogram import HistogramValue


class Logprob(NamedTuple):
    """Log-probability of a token, its rank in the vocabulary (1 is the best), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    ``finish_reason`` is "stop" (``stop_reason`` is the stop string or stop token id, None for the
    model's own end), "length", "abort", "deadline" or "queue_timeout" (its time ran out), or
    "error" (``stop_reason`` says what went wrong); None while it runs. ``cumulative_logprob`` and
    ``logprobs`` are None unless asked for; ``best_of`` asks for the former as well.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Monotonic times in seconds. It waited from its arrival until it was first scheduled."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A request and its continuations. ``prompt`` is None when only token ids were given.

    ``prompt_logprobs`` has, if asked for, an entry for each token of the prompt: of the
    distribution after the tokens before it, and None for the first.
    ``num_cached_tokens`` of the prompt came from the prefix cache, all of them when the answer was
    another request's, see octavo.runtime.caching_engine; None before it was admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True)
class GenerationStats:
    """What the last call cost. A step that runs any part of a prompt counts as prefill."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class EngineCounts:
    """What an engine has counted since it was made.

    Of ``computed_tokens`` that went through the program, ``recomputed_tokens`` had gone through it
    before their request was preempted; ``discarded_tokens`` were sampled for nobody, since their
    request had ended. ``launched_tokens`` counts padding as well. ``scheduled_sequences`` is the
    sum over all steps. Histograms are by name, in seconds or tokens; those of ``queue_seconds`` by
    priority.
    """

    computed_tokens: int = 0
    recomputed_tokens: int = 0
    discarded_tokens: int = 0
    launched_tokens: int = 0
    scheduled_sequences: int = 0
    finished: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    histograms: Mapping[str, HistogramValue] = field(default_factory=lambda: MappingProxyType({}))
    queue_seconds: Mapping[int, HistogramValue] = field(
        default_factory=lambda: MappingProxyType({})
    )


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made, and its state now.

    Of the free blocks ``num_cached_blocks`` hold what may be asked for again; those that requests
    hold are ``num_group_blocks`` by block group (see "Block groups" in docs/scheduling.md). Of
    ``prefix_cache_queries`` tokens of admitted requests ``prefix_cache_hits`` needed no computing;
    ``host_cache_hits`` of these came from host memory, which has room for ``num_host_blocks``.
    ``num_saved_blocks`` went there when they were evicted, and ``num_loaded_blocks`` came back.
    Requests with a deadline that came to their end in time have met it. Of the deterministic
    requests ``result_cache_hits`` were answered from the result cache, ``result_cache_joined`` by
    the computation of an equal one, and ``result_cache_misses`` were computed: all figures of
    tokens and finished requests count these alone.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float
    num_cached_blocks: int = 0
    num_group_blocks: tuple[int, ...] = ()
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    host_cache_hits: int = 0
    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    result_cache_hits: int = 0
    result_cache_joined: int = 0
    result_cache_misses: int = 0
    deadlines_met: int = 0
    deadlines_missed: int = 0
    queue_timeouts: int = 0
    num_used_slots: int = 0  # hold a token's K and V
    num_allocated_slots: int = 0  # blocks in use, by their size
    max_num_seqs: int = 0
    counts: EngineCounts = field(default_factory=EngineCounts)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks

    @property
    def kv_fragmentation(self) -> float:
        """Share of the allocated slots that hold nothing."""
        if self.num_allocated_slots == 0:
            return 0.0
        return 1.0 - self.num_used_slots / self.num_allocated_slots

    @property
    def token_efficiency(self) -> float:
        """Tokens of steps over tokens launched, which is more by the padding."""
        launched = self.counts.launched_tokens
        return self.counts.computed_tokens / launched if launched else 1.0

    @property
    def sequence_efficiency(self) -> float:
        """Sequences of steps over those that a step could have had."""
        possible = self.num_steps * self.max_num_seqs
        return self.counts.scheduled_sequences / possible if possible else 0.0
