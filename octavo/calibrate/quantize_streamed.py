"""The matrices of a graph quantised one after another, each for what it is really multiplied by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.calibrate.gptq import GPTQOptions, damped_diagonal, gptq
from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.interpret import WeightCache, WeightSource
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.fused_linear import LINEARS
from octavo.passes.pipeline import run_pass
from octavo.passes.quant_recipe import Quantization, Recipe


def schemes_of(graph: Graph, recipe: Recipe) -> dict[str, QuantScheme]:
    """The scheme of each weight that quantize-linears would ask a calibration for, by its name."""
    copy = parse_graph(print_graph(graph))
    context = PassContext(0, Quantization(recipe, is_calibrated=True))
    run_pass(copy, "quantize-linears", find_pass("quantize-linears"), Report(context))
    return {
        node.attrs["key"]: QuantScheme.parse(node.attrs["scheme"])
        for node in copy.weight_nodes
        if node.op == "quantized"
    }


def first_linears(graph: Graph, names: Mapping[str, object]) -> Iterator[tuple[Node, Value]]:
    """Of each weight by these names the first linear that reads it, in order, with the weight."""
    seen: set[Value] = set()
    for node in graph.find(*LINEARS):
        weight = node.operand(1)
        if weight.name in names and weight not in seen:
            seen.add(weight)
            yield node, weight


def quantize_streamed(
    graph: Graph,
    weights: WeightSource | WeightCache,
    sequences: Sequence[Sequence[int]],
    schemes: Mapping[str, QuantScheme],
    options: GPTQOptions | None,
) -> Iterator[tuple[str, QuantTensor]]:
    """Quantise by GPTQ, or, for None, to nearest with each column weighed by its mean square input.

    ``graph`` is as quantize-linears finds it. Each matrix sees the inputs that the quantised ones
    before it give; GPTQ lets it come as near as it can to what the whole model has in its place.
    Yields them by name, in the order of the step.
    """
    run = StreamedRun(graph, weights, sequences)
    whole = None
    if options is not None and options.follows_whole:
        whole = StreamedRun(graph, run.cache, sequences)
    seen: dict[Value, _Inputs] = {}
    for linear, weight in first_linears(graph, schemes):
        x = linear.operand(0)
        run.advance(linear)
        if whole is not None:
            whole.advance(linear)
        matrix, scheme = run.weight(weight), schemes[weight.name]
        if options is None:
            made = quantize(matrix, scheme, importance=mean_square(run.values(x)))
        else:
            if x not in seen:  # siblings stand next to each other
                seen = {
                    x: _Inputs.of(
                        run.values(x), None if whole is None else whole.values(x), options.damping
                    )
                }
            made = gptq(seen[x].goal(matrix), seen[x].hessian, scheme, options)
        run.replace(weight, made.dequantize(matrix.dtype))
        yield weight.name, made


@dataclass(frozen=True)
class _Inputs:
    """``hessian`` is ``H = X^T X`` of the inputs that quantised matrices give. ``correction`` is
    ``(Y - X)^T X H^-1`` for the inputs Y of the whole model, all ``f64[K, K]``."""

    hessian: Tensor
    correction: Tensor | None

    @classmethod
    def of(cls, xs: Iterator[Tensor], ys: Iterator[Tensor] | None, damping: float) -> _Inputs:
        if ys is None:
            return cls(hessian_of(xs), None)
        hessian = drift = torch.zeros((), dtype=torch.float64)
        for x, y in zip(xs, ys, strict=True):
            rows, others = x.flatten(0, -2).float(), y.flatten(0, -2).float()
            hessian = hessian + (rows.T @ rows).double()
            drift = drift + (rows.T @ (others - rows)).double()
        damped = hessian.clone()
        damped.diagonal().copy_(damped_diagonal(hessian, damping))
        return cls(hessian, torch.linalg.solve(damped, drift).T)

    def goal(self, matrix: Tensor) -> Tensor:
        """What gives with X what comes nearest to the whole matrix ``[N, K]`` with Y."""
        if self.correction is None:
            return matrix
        return (matrix.double() @ self.correction).add_(matrix).float()


def hessian_of(xs: Iterator[Tensor]) -> Tensor:
    """``X^T X`` of rows that come in chunks: products in f32, their sum in f64."""
    total: Tensor | None = None
    for x in xs:
        rows = x.flatten(0, -2).float()
        product = (rows.T @ rows).double()
        total = product if total is None else total.add_(product)
    assert total is not None, "there is at least one chunk"
    return total


def mean_square(xs: Iterator[Tensor]) -> Tensor:
    """Of each column, ``f32[K]``."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for x in xs:
        rows = x.flatten(0, -2).double()
        total, count = total + rows.square().sum(0), count + len(rows)
    return (total / count).float()
