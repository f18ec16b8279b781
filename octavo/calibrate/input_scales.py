"""The scales of linears' inputs, chosen by what the inputs are: AWQ's and SmoothQuant's.

AWQ (Lin et al. 2023, arXiv:2306.00978, section 3.2): ``s = mean|x|^alpha``, of the alphas tried the
one whose rounded ``W s`` gives the least error of the product. SmoothQuant (Xiao et al. 2022,
arXiv:2211.10438, equation 4), for schemes that round x to integers:
``s = max|x|^0.5 / max|W|^0.5``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.graph import Graph, Value
from octavo.ir.interpret import WeightCache, WeightSource
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import quantize
from octavo.passes.fold_input_scales import InputFold, find_folds

_ALPHAS = tuple(step / 10 for step in range(11))
_SMOOTHNESS = 0.5
_ROWS = 512  # of x, on which errors are measured
_LEAST = 1e-4  # of the mean: a column that is never used is not blown up without bound


@dataclass(frozen=True)
class _Input:
    """What is kept of an x: mean and largest magnitude of each column ``f32[K]``, some rows."""

    mean: Tensor
    largest: Tensor
    rows: Tensor

    @classmethod
    def of(cls, xs: Iterator[Tensor]) -> _Input:
        total, largest = torch.zeros((), dtype=torch.float64), torch.zeros(())
        kept, count = [], 0
        for x in xs:
            rows = x.flatten(0, -2).float()
            total, count = total + rows.abs().double().sum(0), count + len(rows)
            largest = torch.maximum(largest, rows.abs().amax(0))
            kept.append(rows[:: max(1, len(rows) // _ROWS)].clone())
        every = torch.cat(kept)
        return cls((total / count).float(), largest, every[:: max(1, len(every) // _ROWS)])


def choose_input_scales(
    graph: Graph,
    weights: WeightSource | WeightCache,
    sequences: Sequence[Sequence[int]],
    schemes: Mapping[str, QuantScheme],
    *,
    search: bool = True,
) -> Iterator[tuple[InputFold, Tensor]]:
    """Scales ``f32[K]`` of the inputs that can be scaled, of linears whose weights ``schemes``
    names: SmoothQuant's where a scheme rounds x to integers, AWQ's elsewhere if ``search``.

    ``graph`` is as fold-input-scales finds it; it runs unquantised. Inputs that are best left as
    they are are left out.
    """
    run = StreamedRun(graph, weights, sequences)
    for fold in sorted(find_folds(graph), key=lambda fold: graph.nodes.index(fold.linears[0])):
        parts = [(node.operand(1), schemes.get(node.operand(1).name)) for node in fold.linears]
        given = [(run_weight, scheme) for run_weight, scheme in parts if scheme is not None]
        is_smooth = any(scheme.x == "i8" for _, scheme in given)
        if not given or not (search or is_smooth):
            continue
        run.advance(fold.linears[0])
        found = _Input.of(run.values(fold.x))
        if is_smooth:
            yield fold, _smooth(fold, found, [run.weight(value) for value, _ in given])
            continue
        scales = _searched(fold, found, [(_loaded(run, value), scheme) for value, scheme in given])
        if scales is not None:
            yield fold, scales


def _loaded(run: StreamedRun, value: Value) -> Tensor:
    return run.weight(value).float()


def _smooth(fold: InputFold, found: _Input, matrices: list[Tensor]) -> Tensor:
    largest = torch.stack([matrix.abs().amax(0).float() for matrix in matrices]).amax(0)
    return _normalized(
        fold, _bounded(found.largest) ** _SMOOTHNESS / _bounded(largest) ** (1 - _SMOOTHNESS)
    )


def _searched(
    fold: InputFold, found: _Input, parts: list[tuple[Tensor, QuantScheme]]
) -> Tensor | None:
    """The scales of the best alpha, None for an alpha of zero: no scales."""
    exact = [found.rows @ matrix.T for matrix, _ in parts]
    best, least = None, torch.inf
    for alpha in _ALPHAS:
        scales = _normalized(fold, _bounded(found.mean) ** alpha)
        error = sum(
            _error(found.rows / scales, matrix * scales, scheme, goal)
            for (matrix, scheme), goal in zip(parts, exact, strict=True)
        )
        if error < least:
            best, least = (scales if alpha else None), error
    return best


def _error(rows: Tensor, matrix: Tensor, scheme: QuantScheme, goal: Tensor) -> float:
    rounded = quantize(matrix, scheme, search=False).dequantize()
    return float((rows @ rounded.T - goal).square().sum())


def _bounded(sizes: Tensor) -> Tensor:
    floor = sizes.mean() * _LEAST
    return sizes.clamp(min=float(floor) if floor else 1.0)


def _normalized(fold: InputFold, scales: Tensor) -> Tensor:
    """Tied where they have to be, with their extremes as far above one as below it."""
    tied = fold.tied(scales)
    return tied / (tied.max() * tied.min()).sqrt()
