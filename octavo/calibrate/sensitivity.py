"""What each matrix loses in each scheme, measured on a text in one run of the unquantised model.

The measure is the relative error of the product, ``tr((W-Q) H (W-Q)^T) / tr(W H W^T)`` with
``H = X^T X``. Loss grows linearly with such errors while they are small, and those of several
layers add up (Malinovskii et al. 2024, arXiv:2411.17525, theorem 1), so that a sum over layers can
be what is kept least; unlike the error of the weight alone it knows which columns are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.calibrate.quantize_streamed import first_linears, hessian_of
from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.graph import Graph, Value
from octavo.ir.interpret import WeightCache, WeightSource
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import quantize


@dataclass(frozen=True)
class Sensitivity:
    """Of one matrix, by its name: bytes and relative error of each scheme, both zero-loss for
    None, the matrix as it is."""

    name: str
    num_bytes: dict[QuantScheme | None, int]
    errors: dict[QuantScheme | None, float]


def measure_sensitivity(
    graph: Graph,
    weights: WeightSource | WeightCache,
    sequences: Sequence[Sequence[int]],
    candidates: Mapping[str, Sequence[QuantScheme]],
) -> Iterator[Sensitivity]:
    """Measure the matrices that ``candidates`` names, each in all of its schemes, to nearest.

    ``graph`` is as fold-input-scales finds it. Memory is as in ``quantize_streamed``.
    """
    run = StreamedRun(graph, weights, sequences)
    hessians: dict[Value, Tensor] = {}
    for linear, weight in first_linears(graph, candidates):
        x = linear.operand(0)
        run.advance(linear)
        if x not in hessians:
            hessians = {x: hessian_of(run.values(x)).float()}
        matrix = run.weight(weight)
        whole = _weighted(matrix.float(), hessians[x])
        num_bytes: dict[QuantScheme | None, int] = {None: matrix.nbytes}
        errors: dict[QuantScheme | None, float] = {None: 0.0}
        importance = hessians[x].diagonal()
        for scheme in candidates[weight.name]:
            made = quantize(matrix, scheme, importance=importance)
            rows, columns = made.shape
            num_bytes[scheme] = scheme.num_bytes(rows, columns)
            errors[scheme] = _weighted(matrix.float() - made.dequantize(), hessians[x]) / whole
        yield Sensitivity(weight.name, num_bytes, errors)


def _weighted(matrix: Tensor, hessian: Tensor) -> float:
    """``tr(M H M^T)``; of a matrix that meets nothing but zeros, least above zero."""
    return max(float(((matrix @ hessian) * matrix).sum()), 1e-30)
