"""Where the time of a decode step goes, by kernel: PyTorch's profiler, while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from octavo.bench.results import KernelTime, Profile
from octavo.bench.workload import uniform
from octavo.runtime.engine import Engine
from octavo.runtime.llm import LLM
from octavo.runtime.sampling_params import SamplingParams

_PROFILED_STEPS = 10
NEW_TOKENS = 4 * _PROFILED_STEPS  # of each request that is profiled


@dataclass(frozen=True)
class _Running:
    """Requests that all decode, until they are ended."""

    engine: Engine
    request_ids: list[str]

    @classmethod
    def start(cls, llm: LLM, batch_size: int, context: int) -> _Running:
        running = cls(llm.engine, [f"profile-{index}" for index in range(batch_size)])
        params = SamplingParams(
            temperature=0.0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        jobs = uniform(batch_size, context, 1, llm.vocab_size)
        for request_id, job in zip(running.request_ids, jobs, strict=True):
            llm.engine.add_request(request_id, job.prompt, params, kind="final")
        # Until a whole step was decode; and once more, for steps that overlap it.
        for _ in range(2):
            seconds = llm.engine.stats().decode_seconds
            while llm.engine.stats().decode_seconds == seconds:
                llm.engine.step()
        return running

    def end(self) -> None:
        for request_id in self.request_ids:
            self.engine.abort_request(request_id)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def profile_kernels(llm: LLM, *, batch_size: int, context: int) -> Profile:
    """The kernels that the GPU runs in a decode step of the engine, by their names."""
    from torch.profiler import ProfilerActivity, profile

    running = _Running.start(llm, batch_size, context)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_STEPS):
            llm.engine.step()
        torch.cuda.synchronize()
    running.end()
    kernels = [_kernel_time(event) for event in profiler.key_averages()]
    found = [kernel for kernel in kernels if kernel.microseconds]
    found.sort(key=lambda kernel: -kernel.microseconds)
    return Profile(batch_size, context, "by the profiler", found)


def _kernel_time(event: Any) -> KernelTime:
    return KernelTime(
        str(event.key)[:60],
        round(event.count / _PROFILED_STEPS),
        event.self_device_time_total / _PROFILED_STEPS,
    )
