"""The engine's figures in Prometheus' text format: vLLM's names where the meaning is the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.histogram import HistogramValue
from octavo.runtime.outputs import EngineStats

# Names of EngineCounts.histograms, and what they are called outside.
_HISTOGRAMS = {
    "first_token_seconds": (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
    ),
    "inter_token_seconds": (
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a request.",
    ),
    "seconds_per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean of a request's times between tokens.",
    ),
    "request_seconds": ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end."),
    "queue_seconds": ("vllm:request_queue_time_seconds", "From arrival to the first step."),
    "prefill_seconds": ("vllm:request_prefill_time_seconds", "From the first step to a token."),
    "decode_seconds": ("vllm:request_decode_time_seconds", "From the first to the last token."),
    "inference_seconds": ("vllm:request_inference_time_seconds", "From the first step to the end."),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Tokens of a request's prompt."),
    "output_tokens": ("vllm:request_generation_tokens", "Tokens that a request generated."),
    "step_tokens": ("vllm:iteration_tokens_total", "Tokens of a step."),
}
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Tokens of the prompts that were taken."),
    "output_tokens": ("vllm:generation_tokens", "Tokens that were generated and delivered."),
    "num_preemptions": ("vllm:num_preemptions", "Times that a request lost its blocks."),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked for."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found."),
    "host_cache_hits": ("octavo:host_cache_hits", "Of these, tokens found in host memory."),
    "num_saved_blocks": ("octavo:kv_blocks_saved", "KV blocks that were saved to host memory."),
    "num_loaded_blocks": ("octavo:kv_blocks_loaded", "KV blocks that came back from there."),
    "result_cache_hits": ("octavo:result_cache_hits", "Requests answered from the result cache."),
    "result_cache_joined": (
        "octavo:result_cache_joined",
        "Requests answered by the computation of an equal one.",
    ),
    "result_cache_misses": (
        "octavo:result_cache_misses",
        "Requests that either might have answered, and neither did.",
    ),
    "deadlines_met": ("octavo:deadlines_met", "Requests that ended before their deadline."),
    "deadlines_missed": ("octavo:deadlines_missed", "Requests that did not."),
    "queue_timeouts": ("octavo:queue_timeouts", "Requests that waited too long to be started."),
    "num_steps": ("octavo:steps", "Steps of the engine."),
    "prefill_seconds": ("octavo:prefill_step_seconds", "Seconds of steps with a part of a prompt."),
    "decode_seconds": ("octavo:decode_step_seconds", "Seconds of all other steps."),
}
_OWN_COUNTERS = {
    "computed_tokens": ("octavo:computed_tokens", "Tokens that went through the model."),
    "launched_tokens": ("octavo:launched_tokens", "The same with the padding of steps."),
    "recomputed_tokens": ("octavo:recomputed_tokens", "Computed again after a preemption."),
    "discarded_tokens": ("octavo:discarded_tokens", "Sampled for requests that had ended."),
    "scheduled_sequences": ("octavo:scheduled_sequences", "Sequences of all steps, added up."),
}
_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Requests that run."),
    "num_waiting": ("vllm:num_requests_waiting", "Requests that wait for the engine."),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all."),
    "kv_fragmentation": ("octavo:kv_fragmentation", "Share of allocated KV slots that is empty."),
    "token_efficiency": ("octavo:token_efficiency", "Tokens of steps over those launched."),
    "sequence_efficiency": (
        "octavo:sequence_efficiency",
        "Sequences of steps over the most that there could be.",
    ),
    "max_num_seqs": ("octavo:max_num_seqs", "Most sequences of a step."),
    "num_total_blocks": ("octavo:kv_blocks", "Blocks of the KV cache."),
    "num_free_blocks": ("octavo:kv_blocks_free", "Blocks that nobody uses."),
    "num_host_blocks": ("octavo:kv_host_blocks", "Blocks that host memory has room for."),
    "num_used_host_blocks": ("octavo:kv_host_blocks_used", "Of these, such as hold something."),
}


class HttpCounts:
    """Answers by path and status. Paths are those of the routes, so that they stay few."""

    def __init__(self, paths: frozenset[str]) -> None:
        self._paths = paths
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, path: str, status: int) -> None:
        with self._lock:
            self._counts[path if path in self._paths else "other", status] += 1

    def items(self) -> list[tuple[tuple[str, int], int]]:
        with self._lock:
            return sorted(self._counts.items())


class EngineCollector(Collector):
    """Reads the engine when Prometheus asks; until then nothing is kept here."""

    def __init__(self, engine: AsyncLLM, model_name: str, http: HttpCounts) -> None:
        self._engine = engine
        self._http = http
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._histograms(stats)
        yield from self._machine()
        num_requests = self._engine.num_requests
        yield self._gauge("octavo:requests", "Requests taken and not finished.", num_requests)
        answers = CounterMetricFamily(
            "octavo:http_answers", "HTTP answers.", labels=("path", "status")
        )
        for (path, status), count in self._http.items():
            answers.add_metric((path, str(status)), count)
        yield answers

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for field, (name, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for source, table in ((stats, _COUNTERS), (stats.counts, _OWN_COUNTERS)):
            for field, (name, text) in table.items():
                counter = CounterMetricFamily(name, text, labels=self._names())
                counter.add_metric(self._values(), getattr(source, field))
                yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=self._names("finished_reason"),
        )
        for reason, count in sorted(stats.counts.finished.items()):
            success.add_metric(self._values(reason), count)
        yield success

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        for field, (name, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=self._names())
            _add(histogram, self._values(), stats.counts.histograms[field])
            yield histogram
        by_priority = HistogramMetricFamily(
            "octavo:queue_time_seconds",
            "From arrival to the first step, by priority.",
            labels=self._names("priority"),
        )
        for priority, value in sorted(stats.counts.queue_seconds.items()):
            _add(by_priority, self._values(str(priority)), value)
        yield by_priority

    def _machine(self) -> Iterator[Metric]:
        seconds = self._engine.load_times
        yield self._gauge("octavo:startup_seconds", "Seconds of the start.", seconds, "phase")
        memory = self._engine.memory_bytes()
        if memory:
            yield self._gauge("octavo:gpu_memory_bytes", "GPU memory by use.", memory, "part")
        utilization = gpu_utilization()
        if utilization is not None:
            yield self._gauge(
                "octavo:gpu_utilization",
                "Share of the time in which the GPU ran something.",
                utilization,
            )
        info = InfoMetricFamily("octavo:build", "What is served.", labels=self._names())
        manifest = self._engine.artifact.manifest
        about = {"artifact_id": manifest.artifact_id, "target": manifest.target}
        info.add_metric(self._values(), {**about, "dtype": manifest.dtype})
        yield info

    def _gauge(
        self, name: str, text: str, values: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        """One value, or one for each value of a label."""
        more = () if label is None else (label,)
        gauge = GaugeMetricFamily(name, text, labels=self._names(*more))
        if isinstance(values, Mapping):
            for each, value in values.items():
                gauge.add_metric(self._values(each), value)
        else:
            gauge.add_metric(self._values(), values)
        return gauge

    def _names(self, *more: str) -> list[str]:
        return [*self._labels, *more]

    def _values(self, *more: str) -> list[str]:
        return [*self._labels.values(), *more]


def engine_registry(engine: AsyncLLM, model_name: str, http: HttpCounts) -> CollectorRegistry:
    """A registry of its own, so that two servers in one process do not meet."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name, http))
    return registry


def gpu_utilization() -> float | None:
    """By NVML, from 0 to 1; None without a GPU or without the package nvidia-ml-py."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return torch.cuda.utilization() / 100
    except (ModuleNotFoundError, RuntimeError):
        return None


def _add(family: HistogramMetricFamily, labels: list[str], value: HistogramValue) -> None:
    bounds = [*map(str, value.bounds), "+Inf"]
    cumulative = list(accumulate(value.counts))
    family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
