"""Where the time of a decode step goes, by kernel module.

All calls of a module in a step are replayed by themselves, one layer's after the other's. That
leaves out what lies between kernels, and gives each module's bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from octavo.bench.results import KernelTime, Profile
from octavo.runtime.artifact import Artifact
from octavo.runtime.binaries import bind_kernels
from octavo.runtime.module_calls import ModuleCall, StepProgram, StepSize
from octavo.runtime.program_loader import import_program
from octavo.runtime.record_program import kernel_modules

Timer = Callable[[Callable[[], None]], float]


def profile_modules(
    artifact: Artifact,
    device: torch.device,
    timer: Timer,
    *,
    batch_sizes: Sequence[int],
    context: int,
    bandwidth: float,
) -> list[Profile]:
    """The modules of decode steps of these batch sizes, timed one by one by ``timer``."""
    program = import_program(artifact.root, artifact.manifest)
    if device.type == "cuda":
        bind_kernels(artifact, program, device)
    modules = list(kernel_modules(program))
    sizes = [StepSize(size, size, context) for size in batch_sizes]
    step = StepProgram(artifact, device, sizes)
    profiles = []
    for size in sizes:
        groups: dict[str, list[ModuleCall]] = {}
        for call in step.calls(size, modules):
            groups.setdefault(call.name, []).append(call)
        with torch.inference_mode():
            kernels = [
                _module_time(name, calls, step, size, timer, bandwidth)
                for name, calls in groups.items()
            ]
        kernels.sort(key=lambda kernel: -kernel.microseconds)
        profiles.append(Profile(size.num_seqs, context, "each module by itself", kernels))
    return profiles


def _module_time(
    name: str,
    calls: Sequence[ModuleCall],
    step: StepProgram,
    size: StepSize,
    timer: Timer,
    bandwidth: float,
) -> KernelTime:
    def body() -> None:
        for call in calls:
            call()

    seconds = timer(body)
    num_bytes = sum(call_bytes(call, step, size) for call in calls)
    share = num_bytes / bandwidth / seconds if seconds else None
    return KernelTime(name, len(calls), seconds * 1e6, num_bytes, share)


def call_bytes(call: ModuleCall, step: StepProgram, size: StepSize) -> int:
    """Bytes that a call moves: as its module counts them, else its operands and results.

    Of a KV cache those tokens count that the step's sequences attend to, which no module knows.
    """
    caches = [cache for t in call.tensors() if (cache := step.cache_of(t)) is not None]
    if not caches and call.rows is not None and hasattr(call.module, "cost"):
        return int(call.module.cost(call.rows).bytes)
    token_bytes = sum(math.prod(cache.shape[2:]) * cache.itemsize for cache in caches)
    others = {t.data_ptr(): t.nbytes for t in call.tensors() if step.cache_of(t) is None}
    return token_bytes * size.num_seqs * size.context + sum(others.values())
