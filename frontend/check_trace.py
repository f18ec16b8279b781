"""Comparing a traced graph with the Hugging Face model before anything is built on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.frontend.cached_weights import CachedWeights
from octavo.frontend.reference import Prompt, eager_logits
from octavo.frontend.refused import RefusedArchitecture, refusing
from octavo.frontend.rounded_cache import HeadConstants, RoundedCache
from octavo.frontend.tokenwise import check_tokenwise
from octavo.frontend.trace import BoundWeights, Imported
from octavo.frontend.weights import QuantizedSource, WeightSource
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.interpret import interpret
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.weight_cache import WeightCache

# Of the logits' scale, in float32: rounding that grows with the square root of the terms summed in
# a model of 100 layers stays below it, a wrong mask or position is hundreds of times above.
FLOAT32_BOUND = 2.0**-24 * 2**11
NUM_TOP = 8
_SHORT, _LONG = 6, 24
# How far k and v may be off where two programs agree, by the bytes of their dtype: 64 roundings in
# float32, which few layers reach, and two in 16 bits.
_LAST_BITS = {4: 2.0**-18, 2: 2.0**-8}
_LONGEST_WINDOW = 512  # a longer window is not filled, since that would take minutes


@dataclass(frozen=True)
class Distance:
    """How far logits ``[len, V]`` are from the reference's.

    ``largest`` is the largest difference; ``row_rms`` is the root of the mean square over the
    vocabulary, of the worst row: noise hardly moves it, so it shows a small but systematic error.
    """

    largest: float
    row_rms: float

    @classmethod
    def between(cls, got: Tensor, expected: Tensor) -> Distance:
        """Measure; infinite when one of the two has something that is not a number."""
        gap = (got - expected).abs().nan_to_num(torch.inf)
        return cls(float(gap.max()), float(gap.square().mean(-1).sqrt().max()))

    def is_within(self, bound: Distance) -> bool:
        """True when neither measure is above the bound's."""
        return self.largest <= bound.largest and self.row_rms <= bound.row_rms

    def worst(self, other: Distance) -> Distance:
        """The larger of two, measure by measure."""
        return Distance(max(self.largest, other.largest), max(self.row_rms, other.row_rms))

    def times(self, factor: float) -> Distance:
        """Both measures scaled."""
        return Distance(self.largest * factor, self.row_rms * factor)


@dataclass(frozen=True)
class ReferenceRow:
    """What Hugging Face says after the last token of a prompt: its likeliest next tokens."""

    ids: tuple[int, ...]
    first_position: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class TraceCheck:
    """The reference, and how close the traced graph came.

    ``logits`` are Hugging Face's in the compiled dtype, ``[len, V]`` float32 for each of
    ``prompts``; ``bound`` is what the distance from them may be.
    """

    prompts: tuple[Prompt, ...]
    logits: tuple[Tensor, ...]
    rows: tuple[ReferenceRow, ...]
    distance: Distance
    bound: Distance


def check_trace(
    imported: Imported, config: Any, dtype: torch.dtype, weights: WeightSource
) -> TraceCheck:
    """Run the traced graph and Hugging Face's eager model on the same prompts, real weights.

    Lengths are other than the traced one, positions are shifted too, and a sliding window of up to
    512 is overrun. A 16-bit dtype may differ from Hugging Face in that dtype 3 times as much as
    that differs from float32. Raises RefusedArchitecture.
    """
    quantized = weights if isinstance(weights, QuantizedSource) else None
    held = CachedWeights(weights, dtype)
    bound = BoundWeights(held, imported.buffers, quantized)
    with refusing(config.model_type):
        return _check(imported, config, dtype, held, WeightCache(imported.graph, bound))


def _check(
    imported: Imported, config: Any, dtype: torch.dtype, held: CachedWeights, cache: WeightCache
) -> TraceCheck:
    num_ids = config.get_text_config().vocab_size
    check_tokenwise(imported.graph, cache, imported.max_position, num_ids)
    prompts = probe_prompts(imported.graph, imported.max_position, num_ids)
    logits = eager_logits(config, dtype, held, prompts)
    _check_weights_are_numbers(logits, held)
    bound = _bound(config, dtype, held, prompts, logits)
    distance = Distance(0.0, 0.0)
    for (ids, first), expected in zip(prompts, logits, strict=True):
        gap = Distance.between(_graph_logits(imported.graph, cache, ids, first), expected)
        if not gap.is_within(bound):
            raise RefusedArchitecture(
                f"the traced graph disagrees with Hugging Face by"
                f" {gap.largest:.3g} at length {len(ids)} from position {first}, expected at most"
                f" {bound.largest:.3g} (rms of a row: {gap.row_rms:.3g}, {bound.row_rms:.3g});"
                " refusing to compile"
            )
        distance = distance.worst(gap)
    rows = [_row(prompt, rows) for prompt, rows in zip(prompts, logits, strict=True)]
    return TraceCheck(tuple(prompts), tuple(logits), tuple(rows), distance, bound)


def _check_weights_are_numbers(logits: Sequence[Tensor], weights: WeightSource) -> None:
    """Name the weight that made logits NaN: the trace is not to blame for it."""
    if all(bool(rows.isfinite().all()) for rows in logits):
        return
    for key in weights.keys():
        if not bool(weights.load(key).isfinite().all()):
            raise OctavoError(
                f"{key} holds a NaN or an infinity; the checkpoint is damaged, download or export"
                " it again"
            )


def probe_prompts(graph: Graph, max_position: int, num_ids: int) -> list[Prompt]:
    """Prompts that show a wrong trace: one token, a longer run, the last positions."""
    spans = [node.attrs[name] for node in graph.find("attention") for name in ("window", "chunk")]
    longest = max((n for n in spans if n is not None and n <= _LONGEST_WINDOW), default=0)
    lengths_and_starts = [
        (1, 0),
        (max(_LONG, longest + 5), 0),
        (_SHORT, max_position - _SHORT),
    ]
    prompts = {}
    for length, start in lengths_and_starts:
        length = min(length, max_position)
        first = max(0, min(start, max_position - length))
        prompts[length, first] = [(11 + 7919 * i) % num_ids for i in range(length)]
    return [(ids, first) for (_, first), ids in prompts.items()]


def check_rounded(
    config: Any,
    dtype: torch.dtype,
    weights: WeightSource,
    prompts: Sequence[Prompt],
    scheme: KVScheme,
    heads: Sequence[HeadConstants],
) -> tuple[list[ReferenceRow], Distance]:
    """What Hugging Face says with a KV cache of codes, and how far from it a program may be.

    To the bound without codes comes what keys and values that differ in their last bits do, since
    that moves some of them over to the next code. Raises RefusedArchitecture for a model whose own
    cache is not asked for what it attends to.
    """
    with refusing(config.model_type):
        held = CachedWeights(weights, dtype)
        made: list[RoundedCache] = []

        def run(noise: float) -> list[Tensor]:
            def new_cache() -> RoundedCache:
                made.append(RoundedCache(scheme, heads, noise))
                return made[-1]

            return eager_logits(config, dtype, held, prompts, new_cache=new_cache)

        logits = run(0.0)
        if not all(cache.num_updates for cache in made):
            raise RefusedArchitecture(
                "its own code keeps no keys and values in a cache, so nothing says what rounding "
                "them does; leave out --kv-cache-dtype"
            )
        bound = _bound(config, dtype, held, prompts, logits, scheme, heads)
        for moved, still in zip(run(_LAST_BITS[dtype.itemsize]), logits, strict=True):
            bound = bound.worst(Distance.between(moved, still).times(3))
        return [_row(prompt, rows) for prompt, rows in zip(prompts, logits, strict=True)], bound


def _bound(
    config: Any,
    dtype: torch.dtype,
    weights: CachedWeights,
    prompts: Sequence[Prompt],
    logits: Sequence[Tensor],
    scheme: KVScheme | None = None,
    heads: Sequence[HeadConstants] = (),
) -> Distance:
    scale = max(1.0, *(float(rows.abs().max()) for rows in logits))
    bound = Distance(FLOAT32_BOUND * scale, FLOAT32_BOUND * scale)
    if dtype.itemsize >= 4:
        return bound
    # The same rounded weights, computed with in float32: what is left is the dtype's own noise.
    new_cache = None if scheme is None else partial(RoundedCache, scheme, heads)
    wide = eager_logits(
        config,
        torch.float32,
        CachedWeights(weights, torch.float32, limit_bytes=0),
        prompts,
        new_cache=new_cache,
    )
    for rows, exact in zip(logits, wide, strict=True):
        bound = bound.worst(Distance.between(rows, exact).times(3))
    return bound


def _graph_logits(graph: Graph, cache: WeightCache, ids: list[int], first: int) -> Tensor:
    positions = torch.arange(first, first + len(ids))[None]
    (result,) = interpret(graph, {"ids": torch.tensor([ids]), "positions": positions}, cache)
    assert isinstance(result, Tensor)
    return result[0].float()


def _row(prompt: Prompt, logits: Tensor) -> ReferenceRow:
    ids, first = prompt
    logprobs = logits[-1].log_softmax(-1)
    top = logprobs.topk(min(NUM_TOP, len(logprobs)))
    return ReferenceRow(tuple(ids), first, tuple(top.indices.tolist()), tuple(top.values.tolist()))
