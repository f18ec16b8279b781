"""Which sizes of the step are CUDA graphs, and their capture.

Launching a step's kernels one by one takes the host longer than a small step takes the GPU. A graph
is one launch, but of one size: a step runs in the smallest that holds it.
"""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from octavo.runtime.batch import Batch
from octavo.runtime.step_inputs import StepSize

MAX_GRAPH_TOKENS = 512
# What one graph takes on the device, by experience: its nodes, some hundred kernels with arguments.
BYTES_PER_GRAPH = 3 * 2**20

Run = Callable[[], None]


class Capture(Protocol):
    """Turns the launches of a function into something that repeats them."""

    def __call__(self, run: Run) -> Run: ...


def decode_sizes(max_num_seqs: int) -> list[StepSize]:
    """One token a sequence: 1, 2, 4, multiples of 8 to 256, of 32 beyond, and the maximum."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 1, 32)]
    counts = [count for count in steps if count < max_num_seqs]
    return [StepSize(count, count, count) for count in (*counts, max_num_seqs)]


def mixed_sizes(max_num_tokens: int, max_num_seqs: int) -> list[StepSize]:
    """Any lengths: multiples of 8 tokens to 128, of 16 to 256, of 32 to 512.

    A step of more than 48 tokens then has less than 15 % of padding, and a smaller one costs the
    reading of the weights anyhow. Sequences, and their rows of logits, are padded to as many as
    there may be, but to fewer than tokens: equal numbers mean a decode.
    """
    steps = [*range(8, 129, 8), *range(144, 257, 16), *range(288, MAX_GRAPH_TOKENS + 1, 32)]
    sizes = []
    for num_tokens in steps:
        num_seqs = min(max_num_seqs, num_tokens - 1)
        if num_tokens <= max_num_tokens:
            sizes.append(StepSize(num_tokens, num_seqs, num_seqs))
    return sizes


def exact_size(batch: Batch) -> StepSize:
    """The size of a batch itself; a step has at least one row, since a kernel must have work."""
    return StepSize(len(batch.ids), len(batch.seq_lens), max(1, len(batch.logit_rows)))


def warm_up_batch(num_groups: int = 1) -> Batch:
    """One token in the null block: padded to a size, a step that disturbs nobody."""
    zero = np.zeros(1, dtype=np.int64)
    groups = () if num_groups == 1 else (num_groups,)
    return Batch(
        ids=zero,
        positions=zero,
        slot_mapping=np.zeros((*groups, 1), dtype=np.int64),
        block_table=np.zeros((*groups, 1, 1), dtype=np.int32),
        query_start=np.array([0, 1], dtype=np.int32),
        seq_lens=np.ones(1, dtype=np.int32),
        logit_rows=zero,
    )


class GraphSizes:
    """The sizes that are captured, and which of them a step takes."""

    def __init__(self, max_num_tokens: int, max_num_seqs: int) -> None:
        most_seqs = min(max_num_seqs, max_num_tokens)
        self._decode = decode_sizes(most_seqs)
        self._mixed = mixed_sizes(max_num_tokens, max_num_seqs)

    @property
    def all(self) -> list[StepSize]:
        """Largest first: the memory of the first captured then serves all others."""
        return [*reversed(self._mixed), *reversed(self._decode)]

    def padded(self, batch: Batch) -> StepSize | None:
        """The smallest size that holds a batch, None for one that runs plainly."""
        exact = exact_size(batch)
        is_decode = exact.num_tokens == exact.num_seqs
        sizes = self._decode if is_decode else self._mixed
        index = bisect.bisect_left(sizes, exact.num_tokens, key=lambda size: size.num_tokens)
        # A mixed size has fewer rows than tokens, and a prompt may want the logits of them all.
        while index < len(sizes) and sizes[index].num_rows < exact.num_rows:
            index += 1
        return sizes[index] if index < len(sizes) else None


class CudaCapture:
    """Captures graphs of the current stream that share one pool: they never run side by side."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        # Once without: kernels are loaded and cuBLAS makes its choice, which no capture allows.
        run()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it collects garbage before each capture, a tenth of a second.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        return graph.replay


@dataclass(frozen=True)
class CaptureReport:
    """What capturing took."""

    num_graphs: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_graphs} CUDA graphs, {self.seconds:.2f} s, {self.num_bytes / 2**20:.0f} MiB"
        )


def capture_all(
    sizes: GraphSizes,
    capture: Capture,
    run_of: Callable[[StepSize], Run],
    used_bytes: Callable[[], int],
) -> tuple[dict[StepSize, Run], CaptureReport]:
    """A graph of every size, and what they took: ``used_bytes`` reads the device's memory."""
    started, before = time.perf_counter(), used_bytes()
    gc.collect()
    gc.disable()  # freeing a dead tensor's memory in the middle would break the capture
    try:
        graphs = {size: capture(run_of(size)) for size in sizes.all}
    finally:
        gc.enable()
    seconds = time.perf_counter() - started
    return graphs, CaptureReport(len(graphs), seconds, used_bytes() - before)
