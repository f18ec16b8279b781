"""The pipeline: which passes run, in what order, and why each stands where it stands.

This is the page to read first. A model enters as the trace of its Hugging Face source and leaves as
the step that the targets render.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.printer import print_graph
from octavo.ir.verify import verify
from octavo.passes.base import (
    Missed,
    PassContext,
    PassFunction,
    Report,
    count_layers,
    find_pass,
    summarize,
)
from octavo.passes.quant_recipe import AS_IS, Quantization

_COMMON: tuple[str, ...] = (
    # The trace repeats itself (a cast, a mask, a view for each layer): fewer shapes to match later.
    "clean",
    # Sequences lie end to end, so the traced batch of one is noise in every shape after it.
    "drop-batch",
    # Before positions fold: a table may then take its constants, such as inv_freq, for weights.
    "fold-constants",
    # Before anything is raised: what makes the tables is then out of the step.
    "fold-positions",
    # What folding left bare: casts of tables, reshapes around the look-ups.
    "clean",
    # Products first: the other raising passes look for linears and their biases.
    "raise-linear",
    # Before rotary: models that norm each head do so just before they rotate it.
    "raise-norm",
    # After the tables are there: cos and sin have to be rows looked up by position.
    "raise-rotary",
    # Before softcap: the tanh of a GELU is then gone.
    "raise-activation",
    "raise-softcap",
    # The cache holds what attention sees, so k has to be rotated and normed by now.
    "page-attention",
    # After paging: attention needs all rows of the step, what comes after the last one does not.
    "logit-rows",
    # The layouts that rotary and paging asked for meet here, and their transposes cancel.
    "clean",
    # Before the fusions: one product then feeds the rotation and the gated activation.
    "merge-linears",
)

PIPELINE: tuple[str, ...] = (
    *_COMMON,
    # Where a calibration wants it. After merge-linears: siblings share the scales of their input.
    "fold-input-scales",
    # After merge-linears: siblings are one matrix by now, or differ in their schemes.
    "quantize-linears",
    # Before the targets see a norm: the sum it reads is then read once.
    "fuse-add-norm",
    # After cleaning: rotary and write then stand next to each other, with no transpose between.
    "fuse-rotary-kv-write",
    # Splits and views that the fusions left.
    "clean",
)

# GPU kernels have prologues and epilogues of their own, so what stands around a product goes there.
CUDA_PIPELINE: tuple[str, ...] = (
    *_COMMON,
    # Before the last norm is looked at: it then reads the rows alone, and a linear reads it.
    "gather-before-norm",
    # Before fuse-norm-linear, which takes in norms that have no weight.
    "fold-norm-weight",
    # After it: in norms whose weight is folded already, which fuse, scales would be undone again.
    "fold-input-scales",
    # After fold-norm-weight: a folded weight is part of what is rounded. Before the fusions, which
    # take quantised matrices as any other.
    "quantize-linears",
    # Before fuse-add-norm: a residual add costs nothing in the epilogue of the product before it.
    "fuse-linear-add",
    "fuse-norm-linear",
    "fuse-gated-linear",
    "fuse-linear-cast",
    # After them: now the ops that make the stream and those that normalise it are known.
    "emit-sumsq",
    # The norms that are left: with a bias, after the product, of a tied head.
    "fuse-add-norm",
    "fuse-rotary-kv-write",
    # After it: one op of both is left to fuse with the attention.
    "fuse-rotary-attention",
    # Of what nothing else has taken.
    "fuse-pointwise",
    # Splits and views that the fusions left.
    "clean",
)

PIPELINES = {"cpu": PIPELINE, "cuda": CUDA_PIPELINE}


@dataclass(frozen=True)
class Stage:
    """The graph after one pass; number 0 is the graph as it was imported.

    ``text`` is the graph printed with its repeated layers folded.
    """

    number: int
    name: str
    text: str
    rewrites: int
    missed: tuple[Missed, ...]
    seconds: float
    num_nodes: int
    num_layers: int

    @property
    def summary(self) -> str:
        """What was missed, in one line."""
        return summarize(self.missed, self.num_layers)


def run_pipeline(
    graph: Graph,
    *,
    max_position: int,
    target: str = "cpu",
    on_stage: Callable[[Stage], None] | None = None,
    passes: Sequence[str] | None = None,
    quantization: Quantization = AS_IS,
    kv_scheme: KVScheme | None = None,
    has_kv_scales: bool = False,
    has_kv_offsets: bool = False,
) -> list[Stage]:
    """Run the passes on the graph, in place; returns stage 0 and one stage a pass.

    ``target`` is a kind, cpu or cuda, and names the pipeline where ``passes`` does not.
    ``quantization`` says which linears become quantised; ``kv_scheme`` and ``has_kv_scales`` are
    those of PassContext. ``on_stage`` sees each stage while the graph is in that state. Raises
    VerifyError, naming the pass, when a pass leaves a graph that breaks a rule.
    """
    context = PassContext(max_position, quantization, kv_scheme, has_kv_scales, has_kv_offsets)
    functions = [(name, find_pass(name)) for name in passes or PIPELINES[target]]
    verify(graph)
    stages = [_stage(graph, 0, "import", 0, Report(context), 0.0)]
    for name, function in functions:
        if on_stage:
            on_stage(stages[-1])
        start = time.perf_counter()
        report = Report(context)
        rewrites = run_pass(graph, name, function, report)
        seconds = time.perf_counter() - start
        stages.append(_stage(graph, len(stages), name, rewrites, report, seconds))
    if on_stage:
        on_stage(stages[-1])
    return stages


def run_pass(graph: Graph, name: str, function: PassFunction, report: Report) -> int:
    """Run one pass, sweep what it left dead, and verify; returns its count.

    Afterwards ``Origin.values`` of each value names the values of the graph before the pass that it
    came from, and is empty where that is only the value of the same name.
    """
    _own_origins(graph)
    rewrites = function(graph, report)
    graph.sweep()
    try:
        verify(graph)
    except VerifyError as error:
        raise VerifyError(f"after the pass {name}: {error}") from error
    _drop_own_origins(graph)
    return rewrites


def _own_origins(graph: Graph) -> None:
    # A value made during the pass inherits the origin of what it stands for, and so these names.
    for value in graph.named_values():
        value.origin = replace(value.origin, values=(str(value),))


def _drop_own_origins(graph: Graph) -> None:
    for value in graph.named_values():
        if value.origin.values == (str(value),):
            value.origin = replace(value.origin, values=())


def _stage(
    graph: Graph, number: int, name: str, rewrites: int, report: Report, seconds: float
) -> Stage:
    return Stage(
        number=number,
        name=name,
        text=print_graph(graph, fold=True),
        rewrites=rewrites,
        missed=tuple(report.misses),
        seconds=seconds,
        num_nodes=len(graph.nodes),
        num_layers=count_layers(graph),
    )
