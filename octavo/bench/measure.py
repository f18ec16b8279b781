"""Figures out of timelines: medians over repeats, held against the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from octavo.bench.results import Decode, Prefill, Throughput
from octavo.bench.roofline import Roofline
from octavo.bench.timeline import Timeline, run
from octavo.bench.traffic import Traffic
from octavo.bench.workload import of_lengths, uniform
from octavo.runtime.llm import LLM


def warm_up(llm: LLM, batch_size: int, input_len: int, output_len: int) -> None:
    """Run a batch once, uncounted, so that nothing is done for the first time later."""
    run(llm.engine, uniform(batch_size, input_len, output_len, llm.vocab_size))


def measure_decode(
    llm: LLM,
    traffic: Traffic,
    roofline: Roofline,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    repeats: int = 3,
) -> Decode:
    """Tokens a second of a batch that decodes; how, says octavo.bench.timeline."""
    warm_up(llm, batch_size, input_len, min(output_len, 8))
    jobs = uniform(batch_size, input_len, output_len, llm.vocab_size)
    lines = [run(llm.engine, jobs) for _ in range(repeats)]
    step_seconds = [seconds / steps for steps, seconds in (line.decode() for line in lines)]
    context = _mean_context(lines[0], input_len, output_len)
    floor = roofline.seconds(
        traffic.decode_bytes(batch_size, context), traffic.flops(batch_size, batch_size)
    )
    first = statistics.median(line.first_token_seconds for line in lines)
    sizes = (batch_size, input_len, output_len)
    return Decode.of_steps("octavo", sizes, step_seconds, first, floor)


def _mean_context(line: Timeline, input_len: int, output_len: int) -> float:
    """Tokens that a sequence attends to, on average over the measured steps, which are the last."""
    num_steps, _ = line.decode()
    return input_len + output_len - 1 - (num_steps - 1) / 2


def measure_prefill(
    llm: LLM,
    traffic: Traffic,
    roofline: Roofline,
    *,
    num_prompts: int,
    input_len: int,
    repeats: int = 3,
) -> Prefill:
    """Prompt tokens a second of prompts that are each continued by one token.

    The floor counts the linear layers, not attention, and is hence a little too low.
    """
    jobs = uniform(num_prompts, input_len, 1, llm.vocab_size)
    run(llm.engine, jobs)
    seconds = statistics.median(run(llm.engine, jobs).seconds for _ in range(repeats))
    num_tokens = num_prompts * input_len
    floor = roofline.seconds(traffic.weight_bytes, traffic.flops(num_tokens, num_prompts))
    return Prefill(num_prompts, input_len, num_tokens / seconds, seconds, floor, floor / seconds)


def measure_throughput(
    llm: LLM, lengths: Sequence[tuple[int, int]], source: str, *, repeats: int = 1
) -> Throughput:
    """Requests of these prompt and output lengths, all submitted at once, until the last ends."""
    jobs = of_lengths(lengths, llm.vocab_size)
    few = of_lengths([(prompt, min(new, 4)) for prompt, new in lengths[:64]], llm.vocab_size)
    run(llm.engine, few)
    timelines = [run(llm.engine, jobs) for _ in range(repeats)]
    seconds = statistics.median(timeline.seconds for timeline in timelines)
    prompt_tokens = sum(prompt for prompt, _ in lengths)
    output_tokens = sum(new for _, new in lengths)
    return Throughput(
        source=source,
        num_requests=len(lengths),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        requests_per_second=len(lengths) / seconds,
        steps=timelines[-1].groups(),
    )
