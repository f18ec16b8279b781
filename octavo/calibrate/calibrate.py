"""A calibration: scales and codes for a model, from its graph, its weights and a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from octavo.calibrate.code_store import CodeStore
from octavo.calibrate.gptq import GPTQOptions
from octavo.calibrate.input_scales import choose_input_scales
from octavo.calibrate.quantize_streamed import quantize_streamed, schemes_of
from octavo.calibrate.sequences import CalibrationOptions
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.pipeline import PIPELINES, run_pass, run_pipeline
from octavo.passes.quant_recipe import Quantization

Method = Literal["rtn", "gptq", "awq"]
METHODS: tuple[str, ...] = get_args(Method)

Progress = Callable[[int, int], None]  # matrices quantised, matrices in all


@dataclass(frozen=True)
class Calibration:
    """How codes are chosen: by which method, and with how much of the text.

    ``rtn`` rounds to nearest and needs no text. ``gptq`` (with its options) and ``awq`` do. Either
    scales the inputs that a scheme rounds to integers, as SmoothQuant does. ``samples`` left out
    are those of ``CalibrationOptions()``.
    """

    method: Method = "gptq"
    samples: CalibrationOptions | None = None
    gptq: GPTQOptions = field(default_factory=GPTQOptions)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OctavoError(
                f"unknown quantisation method {self.method!r}; there are {', '.join(METHODS)}"
            )


def graph_before_quantization(graph: Graph, *, max_position: int, target: str) -> Graph:
    """A copy of an imported graph as fold-input-scales finds it in a target's pipeline."""
    copy = parse_graph(print_graph(graph))
    passes = PIPELINES[target]
    run_pipeline(
        copy, max_position=max_position, passes=passes[: passes.index("fold-input-scales")]
    )
    return copy


def calibrate(
    graph: Graph,
    store: CodeStore,
    sequences: Sequence[Sequence[int]],
    quantization: Quantization,
    calibration: Calibration,
    progress: Progress | None = None,
) -> Quantization:
    """Quantise, into ``store``, the matrices of a graph as fold-input-scales finds it.

    The graph is used up. Returns what the passes need to know so as to use the store. Memory is
    that of one layer and of what is live between two nodes for all of the text.
    """
    assert quantization.recipe is not None, "without a recipe there is nothing to quantise"
    schemes = schemes_of(graph, quantization.recipe)
    scaled: set[str] = set()
    search = calibration.method == "awq"
    for fold, scales in choose_input_scales(graph, store, sequences, schemes, search=search):
        store.add_buffer(fold.key, scales)
        store.add_buffer(fold.maker_key, fold.factors(scales))
        scaled.add(fold.x.name)
    found = replace(quantization, is_calibrated=True, scaled=frozenset(scaled))
    report = Report(PassContext(0, found))
    run_pass(graph, "fold-input-scales", find_pass("fold-input-scales"), report)
    options = calibration.gptq if calibration.method == "gptq" else None
    made = quantize_streamed(graph, store, sequences, schemes, options)
    for count, (name, matrix) in enumerate(made):
        store.add_matrix(name, matrix)
        if progress is not None:
            progress(count + 1, len(schemes))
    return found
