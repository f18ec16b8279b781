"""What an engine counts, against what a script of requests must add up to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.runtime.histogram import Histogram
from octavo.runtime.llm import LLM
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.test_llm import prompts


def test_a_histogram_counts_like_numpy() -> None:
    bounds = (0.1, 0.5, 2.0)
    values = [0.0, 0.1, 0.10001, 0.4, 0.5, 1.9, 2.0, 2.1, 99.0]
    histogram = Histogram(bounds)
    for each in values:
        histogram.observe(each)
    edges = np.nextafter([-np.inf, *bounds, np.inf], np.inf)  # an upper bound is inclusive
    assert list(histogram.value().counts) == np.histogram(values, edges)[0].tolist()
    assert histogram.value().count == len(values)
    assert histogram.value().mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_the_counts_of_a_batch(shared_toy: Path, overlap: bool) -> None:
    llm = LLM(shared_toy, async_scheduling=overlap, max_num_seqs=4)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    llm.generate(prompts(6), params, use_tqdm=False)
    stats = llm.stats()
    counts = stats.counts
    num_prompt_tokens = sum(map(len, prompts(6)))
    # Each output token but the last is fed back.
    assert counts.computed_tokens - counts.discarded_tokens == num_prompt_tokens + 6 * 8
    assert counts.launched_tokens == counts.computed_tokens
    assert counts.recomputed_tokens == 0
    assert counts.finished == {"length": 6}
    histograms = counts.histograms
    assert histograms["first_token_seconds"].count == 6
    assert histograms["inter_token_seconds"].count == 6 * 8
    assert histograms["output_tokens"].total == 6 * 9
    assert histograms["prompt_tokens"].total == num_prompt_tokens
    assert histograms["step_tokens"].count == stats.num_steps
    assert histograms["step_tokens"].total == counts.computed_tokens
    for name in ("request_seconds", "queue_seconds", "prefill_seconds", "decode_seconds"):
        assert histograms[name].count == 6
    parts = sum(histograms[f"{n}_seconds"].total for n in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(histograms["request_seconds"].total)
    assert counts.queue_seconds[0].total == pytest.approx(histograms["queue_seconds"].total)
    assert 0 < stats.sequence_efficiency <= 1
    assert stats.token_efficiency == 1
    assert (stats.num_allocated_slots, stats.kv_fragmentation) == (0, 0)


@pytest.mark.parametrize("chunk", [0, 7])
def test_what_preemption_costs(shared_toy: Path, chunk: int) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    options = {
        "block_size": 8,
        "long_prefill_token_threshold": chunk,
        "num_gpu_blocks_override": 20,
    }
    llm = LLM(shared_toy, **options)
    llm.generate(prompts(12), params, use_tqdm=False)
    stats = llm.stats()
    assert stats.num_preemptions > 0
    # What was computed beyond what each request needs once was computed again.
    needed = sum(map(len, prompts(12))) + 12 * 29
    assert stats.counts.recomputed_tokens == stats.counts.computed_tokens - needed > 0


def test_fragmentation_is_the_empty_part_of_the_last_blocks(shared_toy: Path) -> None:
    llm = LLM(shared_toy, block_size=16)
    stream = llm.stream([5] * 18, SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stats = llm.stats()
    [request] = llm.engine.scheduler.running.values()
    assert stats.num_allocated_slots == 32
    assert stats.num_used_slots == request.num_computed_tokens
    assert stats.kv_fragmentation == pytest.approx(1 - request.num_computed_tokens / 32)
    stream.close()


def test_prompts_of_one_token_are_timed_too(shared_toy: Path) -> None:
    llm = LLM(shared_toy)
    llm.generate([[5], [6]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert llm.stats().counts.histograms["queue_seconds"].count == 2
    assert llm.stats().counts.queue_seconds[0].count == 2
