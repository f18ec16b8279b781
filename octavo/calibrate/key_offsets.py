"""Offsets that are taken off keys before they become codes of e4m3.

e4m3 rounds a number by a share of its own size, so a key loses less the nearer it is to zero. Much
of a key is the same for all tokens, most of all in the channels that turn slowly with the position.
That part can go: a number that all scores of a query have in common does not change their softmax
(SageAttention, Zhang et al. 2024, takes the mean of a sequence off; here it is one for all texts).

What counts is by how much the errors of keys differ within one softmax: with probabilities p of
keys and errors d of their scores, ``sum p d^2 - (sum p d)^2`` to second order. So a key weighs
``p (1 - p)``, added up over queries, and an error that all keys share is none. The mean is not what
serves best, since the few keys that get most of the attention are unlike the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.interpret import Result
from octavo.ir.kv_scheme import KVScheme, quantize_heads
from octavo.ir.ops.attention import allowed_pairs
from octavo.ir.weight_cache import WeightSource
from octavo.passes.page_attention import K_OFFSET

# Scales of heads and of tokens move where a number lies between two powers of two, and that is
# worth a tenth of the error: the search takes ones for them.
_SCHEME = KVScheme("f8e4m3", "head")
_OUTLIERS = 0.02  # the share of keys on each side that need not lie among the candidates
_STEPS = 16  # candidates in a power of two
_QUERIES = 8  # one query of so many says what keys weigh: no worse than all of them


@dataclass
class _Slot:
    """What is known of a slot's keys: ``f32[N, Hk, D]``, and ``f64[N, Hk]``, what each weighs."""

    keys: Tensor
    weights: Tensor


def find_key_offsets(
    graph: Graph, weights: WeightSource, sequences: Sequence[Sequence[int]]
) -> dict[int, Tensor]:
    """The offset of each slot's keys, ``{slot: f32[Hk, D]}``.

    ``graph`` is one whose attention is paged, as ``graph_before_quantization`` gives it. It is run
    on the CPU for the sequences, all of one length. Memory is that of one layer and of what is live
    between two nodes.
    """
    reads = graph.find("paged_attention")
    keys = {node.attrs["slot"]: node.operand(1) for node in graph.find("kv_write")}
    last = {node.attrs["slot"]: node for node in reads}
    seen: dict[Value, list[Tensor]] = {}  # what later calls of attention read
    wanted = {*keys.values(), *(node.operand(0) for node in reads)}

    def keep(node: Node, results: list[Result]) -> None:
        for value, result in zip(node.outputs, results, strict=True):
            if value in wanted:
                assert isinstance(result, Tensor), f"{value} is no tensor"
                seen.setdefault(value, []).append(result.float())

    run = StreamedRun(graph, weights, sequences, observe=keep)
    slots: dict[int, _Slot] = {}
    offsets: dict[int, Tensor] = {}
    for node in reads:
        run.advance(node)
        slot, q = node.attrs["slot"], node.operand(0)
        if slot not in slots:
            k = torch.cat(seen[keys[slot]])
            slots[slot] = _Slot(k, torch.zeros(k.shape[:2], dtype=torch.float64))
        slots[slot].weights += _weights(node, torch.cat(seen[q]), slots[slot].keys, sequences)
        if last[slot] is node:
            offsets[slot] = _best_offset(slots.pop(slot))
        to_come = reads[reads.index(node) + 1 :]
        needed = {value for r in to_come for value in (r.operand(0), keys[r.attrs["slot"]])}
        for value in seen.keys() - needed:
            del seen[value]
    return offsets


def offset_buffers(graph: Graph, offsets: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The buffers of a graph that are offsets of keys, by their keys; zeros for unknown ones."""
    return {
        weight.attrs["key"]: offsets.get(node.attrs["slot"], torch.zeros(weight.output.shape))
        for node in graph.nodes
        if "slot" in node.attrs
        for value in node.operands
        if value.is_weight
        and (weight := graph.producer(value, "buffer")) is not None
        and weight.attrs["key"].endswith(f".{K_OFFSET}")
    }


def _weights(node: Node, q: Tensor, k: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
    """``p (1 - p)`` of each key ``[N, Hk]``, summed over queries of q ``f32[N, H, D]``."""
    length, num_kv_heads = len(sequences[0]), k.shape[1]
    ticks = torch.arange(length)
    asking = ticks.flip(0)[::_QUERIES]
    hidden = ~allowed_pairs(asking, ticks, True, node.attrs["window"], node.attrs["chunk"])
    weights = torch.empty(k.shape[:2], dtype=torch.float64)
    for first in range(0, len(k), length):
        rows = slice(first, first + length)
        queries = q[rows][asking].view(len(asking), num_kv_heads, -1, q.shape[2])
        for head in range(num_kv_heads):
            scores = queries[:, head].transpose(0, 1) @ k[rows, head].T * node.attrs["scale"]
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            weights[rows, head] = (p - p.square()).sum((0, 1)).double()
    return weights


def _best_offset(slot: _Slot) -> Tensor:
    """``f32[Hk, D]``: for each channel that of the candidates whose errors differ least."""
    share = slot.weights / slot.weights.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    heads = zip(slot.keys.unbind(1), share.float().unbind(1), strict=True)
    return torch.stack([_best_of_head(keys, weights[:, None]) for keys, weights in heads])


def _best_of_head(keys: Tensor, weights: Tensor) -> Tensor:
    """``f32[D]`` for keys ``f32[N, D]`` that weigh ``f32[N, 1]``, 1 together; zero if that does.

    Candidates are multiples of a power of two: last bits, in which machines differ, decide only
    between those that are as good as each other.
    """
    low, high = keys.quantile(torch.tensor([_OUTLIERS, 1 - _OUTLIERS]), dim=0)
    spread = (high - low).clamp(min=2.0**-20)
    step = spread.log2().floor().exp2() / _STEPS
    first = (low / step).floor()
    best = torch.zeros_like(low)
    least = _variance(keys, best, weights)
    for index in range(2 * _STEPS + 2):
        candidate = (first + index) * step
        variance = _variance(keys, candidate, weights)
        best = torch.where(variance < least, candidate, best)
        least = torch.minimum(variance, least)
    return best


def _variance(keys: Tensor, offset: Tensor, weights: Tensor) -> Tensor:
    """``f32[D]``: the weighed variance of what rounding changes in keys."""
    codes, _ = quantize_heads(keys[:, None], _SCHEME, None, offset[None])
    error = codes[:, 0].float() - (keys - offset)
    mean = (error * weights).sum(0)
    return ((error - mean).square() * weights).sum(0)
