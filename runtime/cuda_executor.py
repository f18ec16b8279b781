"""Runs steps on an NVIDIA GPU: launched without waiting, as CUDA graphs where they are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octavo.runtime.artifact import ProgramClass, Step
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_graphs import (
    Capture,
    CaptureReport,
    CudaCapture,
    GraphSizes,
    Run,
    capture_all,
    exact_size,
    warm_up_batch,
)
from octavo.runtime.executor import PendingStep
from octavo.runtime.host_kv_cache import HostKVCache
from octavo.runtime.kv_cache import KVCaches
from octavo.runtime.memory_plan import MemoryUse
from octavo.runtime.sampler import SampleRow
from octavo.runtime.step_inputs import (
    SampleColumns,
    SampleTensors,
    StepInputs,
    StepSize,
    StepTensors,
)

if TYPE_CHECKING:
    from octavo.runtime.binaries import BoundKernels  # imports Triton


class StepSampler(Protocol):
    """What chooses tokens on the device: octavo.runtime.device_sampler."""

    def columns(self, rows: Sequence[SampleRow], padded: int) -> SampleColumns:
        """The parameters of rows as arrays of ``padded`` entries."""
        ...

    def sample(self, logits: Tensor, sampling: SampleTensors) -> object:
        """Choose a token for each row by greedy or plain temperature. May be captured."""
        ...

    def finish(
        self, logits: Tensor, sampling: SampleTensors, rows: Sequence[SampleRow]
    ) -> PendingStep:
        """Choose again for rows with filters or edits, and start the copy of all tokens back."""
        ...


class _SizedStep:
    """The step of one size: the ids, the program, and the tokens of all rows without filters."""

    def __init__(self, program: Step, tensors: StepTensors, sampler: StepSampler) -> None:
        self.tensors = tensors
        self.logits: Tensor | None = None
        self._program = program
        self._sampler = sampler

    def run(self) -> None:
        """Launch the kernels. What is captured is this, so it reads nothing back."""
        self.tensors.take_ids()
        self.logits = self._program(*self.tensors.program)
        self._sampler.sample(self.logits, self.tensors.sampling)


class CudaExecutor:
    """One GPU's copy of the program.

    A step is: copies of KV blocks to and from host memory where there are some, one copy of its
    inputs from pinned memory, one graph (or its kernels one by one), filters for the rows that ask
    for them, and one copy of the tokens back. The host waits only in ``PendingStep.result``. All of
    it is on one stream, so steps need no other order. ``captured`` and ``memory`` say what its
    graphs and the load took, ``kernels`` what had to be compiled.
    """

    def __init__(
        self,
        program: ProgramClass,
        weights: Mapping[str, Tensor],
        kv_caches: KVCaches,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        inputs: StepInputs,
        make_sampler: Callable[[Step, Tensor], StepSampler],
        stream: torch.cuda.Stream | None,
        host_kv_cache: HostKVCache | None = None,
    ) -> None:
        """``make_sampler`` is given the program and where the sampled tokens go."""
        self.kv_caches = kv_caches
        self.captured: CaptureReport | None = None
        self.memory: MemoryUse | None = None
        self.kernels: BoundKernels | None = None
        self.num_launched_tokens = 0
        self._stream = stream
        self._host_kv_cache = host_kv_cache
        self._inputs = inputs
        self._sizes: GraphSizes | None = None
        self._steps: dict[StepSize, tuple[_SizedStep, Run]] = {}
        self._capacity = (max_num_tokens, max_num_seqs)
        with self._on_stream():
            self._program = program(
                weights, kv_caches, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs
            )
            self._sampler = make_sampler(self._program, inputs.tokens)

    def capture_graphs(
        self, capture: Capture | None = None, used_bytes: Callable[[], int] = lambda: 0
    ) -> CaptureReport:
        """Make graphs of all sizes that get one; without this every step is launched plainly."""
        sizes = GraphSizes(*self._capacity)
        steps = {size: self._sized(size) for size in sizes.all}
        with self._on_stream():

            def run_of(size: StepSize) -> Run:
                self._copy_in(warm_up_batch(self._inputs.num_groups), (), size)
                return steps[size].run

            graphs, report = capture_all(sizes, capture or CudaCapture(), run_of, used_bytes)
        self._steps = {size: (steps[size], graph) for size, graph in graphs.items()}
        self._sizes = sizes
        self.captured = report
        return report

    def launch(self, batch: Batch, rows: Sequence[SampleRow]) -> PendingStep:
        """Start a step. Nothing in here waits for the GPU."""
        with self._on_stream():
            size = self._sizes.padded(batch) if self._sizes is not None else None
            if size is None:
                step = self._sized(exact_size(batch))
                run = step.run
            else:
                step, run = self._steps[size]
            self.num_launched_tokens = step.tensors.size.num_tokens
            if self._host_kv_cache is not None:
                self._host_kv_cache.copy(batch.saves, batch.loads)
            self._copy_in(batch, rows, step.tensors.size)
            run()
            assert step.logits is not None
            return self._sampler.finish(step.logits, step.tensors.sampling, rows)

    def _sized(self, size: StepSize) -> _SizedStep:
        return _SizedStep(self._program, self._inputs.tensors(size), self._sampler)

    def _copy_in(self, batch: Batch, rows: Sequence[SampleRow], size: StepSize) -> None:
        self._inputs.copy_in(batch, self._sampler.columns(rows, size.num_rows), size)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The executor's own stream: the default one cannot be captured. The device comes with it,
        which is a property of the thread, and any thread may run the engine."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield
