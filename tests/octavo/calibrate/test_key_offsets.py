"""Offsets of keys against a search of our own, in float64 and with e4m3 of our own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.calibrate.key_offsets import find_key_offsets, offset_buffers
from octavo.ir.graph import Graph
from octavo.ir.parser import parse_graph

LENGTH, VOCABULARY = 96, 50
SEQUENCES = [[(7 * i * i + s) % VOCABULARY for i in range(LENGTH)] for s in (3, 8)]
HEADS, KV_HEADS, DIM = 4, 2, 8

# Two calls read the first slot, each with a window or none; the second has the same keys.
_KV = "kv<f32, 2 x [2, 8, 8]>"
_STEP = "%block_table, %query_start, %seq_lens"
TEXT = f"""graph @m(
  %ids: i64[T],
  %slot_mapping: i64[T],
  %block_table: i32[S, B],
  %query_start: i32[S+1],
  %seq_lens: i32[S],
  %kv: {_KV}
) {{
  weights {{
    @q: f32[50, 32] = checkpoint(key="q")
    @k: f32[50, 16] = checkpoint(key="k")
  }}
  %q.flat: f32[T, 32] = embedding(%ids, @q)
  %k.flat: f32[T, 16] = embedding(%ids, @k)
  %q: f32[T, 4, 8] = reshape(%q.flat, shape=[T, 4, 8])
  %k: f32[T, 2, 8] = reshape(%k.flat, shape=[T, 2, 8])
  %v: f32[T, 2, 8] = neg(%k)
  %kv~1: {_KV} = kv_write(%kv, %k, %v, %slot_mapping, slot=0)
  %one: f32[T, 4, 8] = paged_attention(%q, %kv~1, {_STEP}, slot=0, scale=0.3)
  %two: f32[T, 4, 8] = paged_attention(%one, %kv~1, {_STEP}, slot=0, scale=0.5, window=9)
  %kv~2: {_KV} = kv_write(%kv~1, %k, %k, %slot_mapping, slot=1)
  %three: f32[T, 4, 8] = paged_attention(%two, %kv~2, {_STEP}, slot=1, scale=0.3)
  return %three, %kv~2
}}
"""


class Weights:
    """Keys that have much in common, and a few that are unlike the others and get attention."""

    def __init__(self) -> None:
        self.common = torch.randn(KV_HEADS * DIM) * 4
        keys = self.common + 0.3 * torch.randn(VOCABULARY, KV_HEADS * DIM)
        keys[:5] = 0.2 * torch.randn(5, KV_HEADS * DIM)
        self.tables = {"q": torch.randn(VOCABULARY, HEADS * DIM) - self.common.repeat(2) / 4}
        self.tables["k"] = keys

    def load(self, key: str) -> Tensor:
        return self.tables[key]


def e4m3(x: Tensor) -> Tensor:
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def probabilities(q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """``[H, L, L]`` of q ``[L, H, D]`` and k ``[L, Hk, D]``."""
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * scale
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    hidden = (j > i) | (i - j >= (window or LENGTH))
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def moved(offset: Tensor, k: Tensor, ps: list[Tensor]) -> Tensor:
    """By how much rounding k ``[L, Hk, D]`` moves softmaxes, ``[Hk, D]``: the channels apart."""
    error = e4m3(k - offset) - (k - offset)
    total = torch.zeros(KV_HEADS, DIM, dtype=torch.float64)
    for p in ps:
        grouped = p.unflatten(0, (KV_HEADS, -1)).flatten(1, 2)  # [Hk, queries, L]
        mean = torch.einsum("hqj,jhd->hqd", grouped, error)
        total += (torch.einsum("hqj,jhd->hqd", grouped, error.square()) - mean.square()).sum(1)
    return total


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def offsets(weights: Weights) -> dict[int, Tensor]:
    return find_key_offsets(parse_graph(TEXT), weights, SEQUENCES)  # type: ignore[arg-type]


def reference(weights: Weights, offset: Tensor) -> float:
    """How far the softmaxes of the first slot's two calls move, for all sequences."""
    total = 0.0
    for ids in SEQUENCES:
        q = weights.tables["q"][ids].double().view(LENGTH, HEADS, DIM)
        k = weights.tables["k"][ids].double().view(LENGTH, KV_HEADS, DIM)
        first = probabilities(q, k, 0.3, None)
        one = torch.einsum("hij,jhd->ihd", first, -k.repeat_interleave(2, 1))
        second = probabilities(one, k, 0.5, 9)
        total += float(moved(offset.double(), k, [first, second]).sum())
    return total


def test_an_offset_leaves_less_than_half_of_the_error(
    weights: Weights, offsets: dict[int, Tensor]
) -> None:
    found = reference(weights, offsets[0])
    assert found < 0.5 * reference(weights, torch.zeros(KV_HEADS, DIM))
    # What one would take at once: the mean of all tokens, which all count alike in it.
    every = torch.stack([weights.tables["k"][ids] for ids in SEQUENCES]).flatten(0, 1)
    mean = every.mean(0).view(KV_HEADS, DIM)
    assert found < reference(weights, mean)
    drawn = every.view(-1, KV_HEADS, DIM)[torch.randint(len(every), (40,))]
    assert found < min(reference(weights, offset) for offset in drawn)


def test_a_slot_of_other_readers_has_another_offset(offsets: dict[int, Tensor]) -> None:
    assert offsets.keys() == {0, 1}
    assert offsets[0].shape == offsets[1].shape == (KV_HEADS, DIM)
    assert not torch.equal(offsets[0], offsets[1])


def test_last_bits_of_keys_move_hardly_an_offset(
    weights: Weights, offsets: dict[int, Tensor]
) -> None:
    """Machines that add in another order find the same, but where two candidates are as good."""
    draw = torch.Generator().manual_seed(0)
    for table in weights.tables.values():
        table *= 1 + 2.0**-22 * torch.randn(table.shape, generator=draw)
    again = find_key_offsets(parse_graph(TEXT), weights, SEQUENCES)  # type: ignore[arg-type]
    moved = torch.cat([(again[slot] != offset).flatten() for slot, offset in offsets.items()])
    assert moved.float().mean() <= 0.1, "most of them are multiples of a power of two, the same"


def test_keys_that_are_all_the_same() -> None:
    weights = Weights()
    weights.tables["k"][:] = weights.common
    offset = find_key_offsets(parse_graph(TEXT), weights, SEQUENCES)[0]  # type: ignore[arg-type]
    assert bool(offset.isfinite().all()), "an error that all keys have is none"


def written(k_offset: str) -> Graph:
    kv = "kv<f8e4m3 head, 1 x [2, 8, 8]>"
    return parse_graph(
        f"graph @m(%k: f32[T, 2, 8], %slots: i64[T], %kv: {kv}) {{\n"
        f'  weights {{\n    @o: f32[2, 8] = buffer(key="{k_offset}")\n  }}\n'
        f"  %kv~1: {kv} = kv_write(%kv, %k, %k, %slots, none, none, @o, slot=0)\n"
        "  return %kv~1\n}\n"
    )


def test_offsets_are_buffers_by_their_keys() -> None:
    graph, offset = written("layers.3.attn.k_offset"), torch.randn(2, 8)
    assert offset_buffers(graph, {0: offset}) == {"layers.3.attn.k_offset": offset}
    [zeros] = offset_buffers(graph, {}).values()
    assert zeros.shape == (2, 8)
    assert not zeros.any()
