"""Chooses among the candidates of kernel modules by measuring them on the GPU at hand.

For each row bucket of each module the calls of a real step are replayed with every candidate. A
candidate counts only if it gives what the first one gives. What is fast by itself is then tried in
whole decode steps (tune_steps.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.artifact import Artifact
from octavo.runtime.binaries import BoundKernels, bind_kernels
from octavo.runtime.candidates import Candidate, GpuFault, chosen, compare, problem_of
from octavo.runtime.cuda_driver import CudaError
from octavo.runtime.device import device_for
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import Bucket, Choices, Launch, Workspace, recording
from octavo.runtime.module_calls import ModuleCall, StepProgram, StepSize, intercepted, with_rows
from octavo.runtime.plan_files import ship_binaries, write_plan
from octavo.runtime.plans import Plan, current_plan, gpu_plan_name
from octavo.runtime.program_loader import import_program
from octavo.runtime.record_program import MAX_DECODE, kernel_modules
from octavo.runtime.tune_steps import Contest, TunedStep, tune_step

CONTEXT = 1024  # tokens that a sequence of a decode step attends to on average
MANY_TOKENS = 8192  # of a step in the last row bucket
_PROMPT = 2048  # tokens of a prompt in a prefill step
_ENOUGH_BYTES = 1 << 30  # of distinct operands in one replay: many times any L2 cache
_FEWEST_CALLS = 4
_REPLAYS = 7
_MARGIN = 0.99  # another candidate than the default has to be faster by this: times have noise

# Seconds that a body takes, the median of several runs.
Timer = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Trial:
    """One candidate: seconds of a call, or why it was passed over."""

    candidate: Candidate
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Tuned:
    """What was tried for one row bucket of one module, and what was chosen."""

    module: str
    bucket: str
    rows: int
    trials: list[Trial]
    default: Candidate
    chosen: Candidate


@dataclass
class TuneReport:
    """The result of a tuning: the plan, its file, and each bucket's trials.

    ``tuned`` says what was fastest by itself, ``steps`` what came of it in whole decode steps.
    ``num_skipped`` buckets were left as they were, since the time was up. ``stopped`` says why the
    tuning ended early, if it did: after a fault the GPU cannot be used by this process any more.
    """

    path: Path
    plan: Plan = field(default_factory=dict)
    tuned: list[Tuned] = field(default_factory=list)
    steps: list[TunedStep] = field(default_factory=list)
    num_skipped: int = 0
    stopped: str | None = None


def tune_artifact(
    directory: Path,
    *,
    seconds: float = 300.0,
    show: Callable[[str], None] = lambda text: None,
) -> TuneReport:
    """Measure this GPU's plan, and write it into the artifact, whose content id stays what it is.

    After ``seconds`` no further bucket is begun. Raises ArtifactError for an artifact of another
    target or of format 1, whose content id covers plans, and where there is no GPU.
    """
    artifact = Artifact.open(directory, verify=False)
    if not artifact.manifest.target.startswith("cuda"):
        raise ArtifactError(
            f"{directory}: only Triton kernels are tuned, and this artifact is for "
            f"{artifact.manifest.target}"
        )
    if artifact.manifest.id_covers("plans/"):
        raise ArtifactError(
            f"{directory}: the content id of a manifest of format {artifact.manifest.format} covers"
            " plans, so that none can be added; compile the model again"
        )
    device = device_for(artifact.manifest.target)
    program = import_program(artifact.root, artifact.manifest)
    bound = bind_kernels(artifact, program, device)
    modules = tunable(kernel_modules(program))
    report = TuneReport(Path("plans") / gpu_plan_name(torch.cuda.get_device_name(device)))
    sizes = step_sizes(modules)
    step = StepProgram(artifact, device, sizes)
    tuner = Tuner(step, modules, graph_seconds, bound)
    tuner.run(sizes, report, deadline=time.monotonic() + seconds, show=show)
    report.plan = current_plan(modules)
    binaries = ship_binaries(artifact, program, bound)
    write_plan(artifact, report.path, report.plan, binaries)
    return report


def tunable(modules: Iterable[ModuleType]) -> list[ModuleType]:
    """The modules that have more than one way for some number of rows."""
    return [
        module
        for module in modules
        if isinstance(choices := getattr(module, "CHOICES", None), Choices)
        and any(len(bucket.candidates) > 1 for bucket in choices.buckets)
    ]


def step_sizes(modules: Iterable[ModuleType]) -> list[StepSize]:
    """A step for the largest number of rows of each bucket: decode as far as that goes."""
    bounds = {bucket.max_rows for module in modules for bucket in module.CHOICES.buckets}
    sizes = []
    for rows in [*sorted(bounds - {None}), MANY_TOKENS]:
        num_seqs = rows if rows <= MAX_DECODE else -(-rows // _PROMPT)
        is_decode = rows <= MAX_DECODE
        # Were they even, one share for each sequence would be best, and a long one waited for.
        sizes.append(StepSize(rows, num_seqs, CONTEXT if is_decode else 1, is_even=not is_decode))
    return sizes


@dataclass(frozen=True)
class _Job:
    """The calls of one module that fall into one bucket, in a step of the size that is largest."""

    size: StepSize
    bucket: Bucket
    rows: int
    calls: list[ModuleCall]


class Tuner:
    """Tries candidates on the steps of one program. ``bound`` compiles what they need, at once."""

    def __init__(
        self,
        step: StepProgram,
        modules: Sequence[ModuleType],
        timer: Timer,
        bound: BoundKernels | None = None,
    ) -> None:
        self._step = step
        self._modules = modules
        self._timer = timer
        self._bound = bound

    def run(
        self,
        sizes: Iterable[StepSize],
        report: TuneReport,
        *,
        deadline: float,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Tune all buckets until the deadline, by ``time.monotonic``; each is then chosen."""
        jobs = self._jobs(sizes)
        with torch.inference_mode():
            if self._tune_all(jobs, report, deadline, show):
                self._tune_steps(jobs, report, deadline, show)

    def _tune_all(
        self,
        jobs: Sequence[_Job],
        report: TuneReport,
        deadline: float,
        show: Callable[[str], None],
    ) -> bool:
        """Tune each bucket by itself; True when all of them were."""
        prepared = 0
        for number, job in enumerate(jobs, start=1):
            if time.monotonic() > deadline:
                report.num_skipped = len(jobs) - number + 1
                return False
            if job.rows > prepared:  # not all at once: that may take longer than there is time
                show(f"compiling the candidates for {job.rows} rows")
                self._prepare([each for each in jobs if each.rows == job.rows])
                prepared = job.rows
            name = job.calls[0].name
            show(f"{number} of {len(jobs)}: {name}, {job.rows} rows")
            try:
                report.tuned.append(self._tune(job))
            except GpuFault as fault:
                report.stopped = f"{name}, {job.rows} rows: {fault}"
                return False
        return True

    def _tune_steps(
        self,
        jobs: Sequence[_Job],
        report: TuneReport,
        deadline: float,
        show: Callable[[str], None],
    ) -> None:
        """Tune decode steps as wholes, the smallest first."""
        contests: dict[StepSize, list[Contest]] = {}
        for job, tuned in zip(jobs, report.tuned, strict=True):
            alone = [
                (trial.seconds * len(job.calls), trial.candidate)
                for trial in tuned.trials
                if trial.seconds is not None
            ]
            if alone and job.size.num_tokens == job.size.num_seqs:
                alone.sort(key=lambda each: (each[1] != tuned.chosen, each[0]))
                contest = Contest(tuned.module, job.bucket, tuned.default, alone)
                contests.setdefault(job.size, []).append(contest)
        for size, each in contests.items():
            if time.monotonic() > deadline:
                return
            show(f"a decode step of {size.num_tokens} rows")
            try:
                step = tune_step(self._step, size, each, self._timer, deadline=deadline)
            except GpuFault as fault:
                report.stopped = f"a step of {size.num_tokens} rows: {fault}"
                return
            report.steps.append(step)

    def _jobs(self, sizes: Iterable[StepSize]) -> list[_Job]:
        """For each bucket the step in which it is asked for most rows, small buckets first."""
        found: dict[tuple[str, str], _Job] = {}
        for size in sizes:
            calls: dict[tuple[str, str], list[ModuleCall]] = {}
            for call in self._step.calls(size, self._modules):
                if call.bucket is not None and len(call.bucket.candidates) > 1:
                    calls.setdefault((call.name, call.bucket.name), []).append(call)
            for key, each in calls.items():
                most = max(call.rows or 0 for call in each)
                if key not in found or found[key].rows <= most:
                    assert each[0].bucket is not None
                    largest = [call for call in each if call.rows == most]
                    found[key] = _Job(size, each[0].bucket, most, largest)
        return sorted(found.values(), key=lambda job: job.rows)

    def _prepare(self, jobs: Iterable[_Job]) -> None:
        """Compile what all candidates launch, in parallel. One that cannot be fails on its own,
        when it is tried."""
        if self._bound is None:
            return
        launches: dict[Any, Launch] = {}
        for job in jobs:
            for candidate in job.bucket.candidates:
                for launch in _recorded(job.calls[0], job.bucket, candidate):
                    launches[launch.identity] = launch
        try:
            self._bound.prepare(launches.values())
        except (ArtifactError, CudaError):
            return

    def _tune(self, job: _Job) -> Tuned:
        default = dict(job.bucket.chosen)
        problems = self._problems(job)
        calls = self._enough(job.calls)
        trials = [
            self._timed(job.bucket, candidate, calls)
            if problem is None
            else Trial(candidate, None, problem)
            for candidate, problem in zip(job.bucket.candidates, problems, strict=True)
        ]
        best = choose(trials, default)
        job.bucket.chosen = dict(best)
        return Tuned(calls[0].name, job.bucket.name, job.rows, trials, default, best)

    def _timed(self, bucket: Bucket, candidate: Candidate, calls: list[ModuleCall]) -> Trial:
        def body() -> None:
            for call in calls:
                call()

        try:
            with chosen(bucket, candidate):
                return Trial(candidate, self._timer(body) / len(calls))
        except Exception as error:
            return Trial(candidate, None, problem_of(error, self._step.device))

    def _problems(self, job: _Job) -> list[str | None]:
        """What is wrong with each candidate, on the values that a step hands to its first call."""
        found: list[str | None] = []

        def handle(call: ModuleCall) -> Any:
            seen, result = with_rows(call)
            if found or seen.bucket is not job.bucket or seen.name != job.calls[0].name:
                return result
            # The call may have overwritten an operand; what is in it now serves as well.
            found.extend(compare(seen, job.bucket, self._step.device))
            return result

        with intercepted([job.calls[0].module], handle):
            self._step.run(job.size)
        return found

    def _enough(self, calls: list[ModuleCall]) -> list[ModuleCall]:
        """As many calls as have more operands than a cache could keep, all if they have not."""
        seen: dict[int, int] = {}
        for count, call in enumerate(calls, start=1):
            for tensor in call.tensors():
                if self._step.cache_of(tensor) is None:
                    seen[tensor.data_ptr()] = tensor.nbytes
            if count >= _FEWEST_CALLS and sum(seen.values()) >= _ENOUGH_BYTES:
                return calls[:count]
        return calls


def choose(trials: Sequence[Trial], default: Candidate) -> Candidate:
    """The fastest candidate; the default unless another is clearly faster, the first of equals."""
    timed = [(trial.seconds, trial.candidate) for trial in trials if trial.seconds is not None]
    if not timed:
        return default
    best, candidate = min(timed, key=lambda item: item[0])
    usual = next((seconds for seconds, each in timed if each == default), None)
    return default if usual is not None and best > _MARGIN * usual else candidate


def _recorded(call: ModuleCall, bucket: Bucket, candidate: Candidate) -> list[Launch]:
    """What a call launches with a candidate; nothing where it does not run: trying it says why."""
    try:
        with recording() as launches, chosen(bucket, candidate):
            call.run(
                *(_on_meta(value) for value in call.args),
                **{name: _on_meta(value) for name, value in call.keywords.items()},
            )
    except (ValueError, TypeError, RuntimeError):
        return []
    return launches


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return Workspace.allocate("meta") if isinstance(value, Workspace) else value


def graph_seconds(body: Callable[[], None]) -> float:
    """Seconds of a body on the GPU, replayed as a CUDA graph: the median of several replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()  # loads what is loaded at the first call
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        graph.replay()
        return statistics.median(_replay_seconds(graph) for _ in range(_REPLAYS))


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
