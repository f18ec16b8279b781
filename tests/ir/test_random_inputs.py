"""Random batches are valid ones: what pass tests interpret on."""

from __future__ import annotations

import pytest
import torch

from octavo.ir.errors import VerifyError
from octavo.ir.interpret import interpret
from octavo.ir.parser import parse_graph
from octavo.ir.random_inputs import BLOCK_SIZE, RandomSource, random_inputs

PAGED = """graph @paged(%ids: i64[T], %positions: i64[T], %slot_mapping: i64[T],
    %block_table: i32[S, B], %query_start: i32[S+1], %seq_lens: i32[S], %logit_rows: i64[R],
    %kv: kv<f32, 1 x [2, 8, 8]>, @embed: f32[50, 16], @table: f32[12, 16]) {
  %x: f32[T, 16] = embedding(%ids, @embed)
  %p: f32[T, 16] = gather_rows(@table, %positions)
  %h: f32[T, 16] = add(%x, %p)
  %k: f32[T, 2, 8] = reshape(%h, shape=[T, 2, 8])
  %kv~1: kv<f32, 1 x [2, 8, 8]> = kv_write(%kv, %k, %k, %slot_mapping, slot=0)
  %a: f32[T, 2, 8] = paged_attention(%k, %kv~1, %block_table, %query_start, %seq_lens,
      slot=0, scale=0.3)
  %l: f32[R, 2, 8] = gather_rows(%a, %logit_rows)
  return %l, %kv~1
}
"""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [{}, {"T": 1, "S": 1, "B": 1, "R": 1}, {"T": 9, "S": 4, "R": 2}])
def test_a_paged_batch_is_consistent(sizes, seed):
    graph = parse_graph(PAGED)
    given = random_inputs(graph, sizes, seed)
    starts, lens = given["query_start"].tolist(), given["seq_lens"].tolist()
    assert starts[0] == 0
    assert starts[-1] == given["ids"].shape[0]
    blocks = [b for row in given["block_table"].tolist() for b in row if b]
    assert len(set(blocks)) == len(blocks), "a block of two sequences"
    for s, length in enumerate(lens):
        row = given["block_table"][s].tolist()
        for token in range(starts[s], starts[s + 1]):
            position = length - (starts[s + 1] - token)
            assert given["positions"][token] == position < 12
            block, offset = divmod(given["slot_mapping"][token].item(), BLOCK_SIZE)
            assert (block, offset) == (row[position // BLOCK_SIZE], position % BLOCK_SIZE)
    assert not given["kv"].keys[0][0].isfinite().any(), "the null block holds nothing"
    logits, _ = interpret(graph, given, RandomSource(graph, seed))
    assert logits.isfinite().all(), "something read what was never written"


def test_block_groups_have_tables_that_share_no_block():
    """Both read what was written through the same table; through the other's it would be NaN."""
    text = PAGED.replace(
        "i64[T],\n    %block_table: i32[S, B]", "i64[3, T],\n    %block_table: i32[3, S, B]"
    )
    start = text.index("  %x:")
    selects = (
        "  %table: i32[S, B] = select(%block_table, dim=0, index=2)\n"
        "  %slots: i64[T] = select(%slot_mapping, dim=0, index=2)\n"
    )
    body = text[start:].replace("%block_table", "%table").replace("%slot_mapping", "%slots")
    graph = parse_graph(text[:start] + selects + body)
    given = random_inputs(graph)
    blocks = [b for b in given["block_table"].flatten().tolist() if b]
    assert len(set(blocks)) == len(blocks)
    assert interpret(graph, given, RandomSource(graph))[0].isfinite().all()
    given["block_table"] = given["block_table"].flip(0)
    assert interpret(graph, given, RandomSource(graph))[0].isnan().any()


def test_too_many_tokens_for_the_blocks_are_refused():
    with pytest.raises(VerifyError, match="a sequence holds 4, not 5 tokens"):
        random_inputs(parse_graph(PAGED), {"T": 5, "S": 1, "B": 1})


def test_without_a_cache_positions_count_from_zero_and_ids_stay_in_the_vocabulary():
    graph = parse_graph(
        "graph @g(%ids: i64[1, T], %positions: i64[1, T], @e: f32[3, 4]) {\n"
        "  %s: i64[T] = squeeze(%ids, dim=0)\n  %x: f32[T, 4] = embedding(%s, @e)\n  return %x\n}"
    )
    given = random_inputs(graph, {"T": 200})
    assert given["positions"].tolist() == [list(range(200))]
    assert given["ids"].shape == (1, 200)
    assert set(given["ids"].flatten().tolist()) == {0, 1, 2}


def test_equal_seeds_give_equal_tensors_whatever_the_stage():
    graph = parse_graph(PAGED)
    for seed in (0, 1):
        one, other = (random_inputs(graph, seed=seed) for _ in range(2))
        assert torch.equal(one["ids"], other["ids"])
    same = parse_graph(
        'graph @later() {\n weights { @x: f32[50, 16] = checkpoint(key="embed") }\n return @x\n}'
    )
    assert torch.equal(RandomSource(graph).load("embed"), RandomSource(same).load("embed"))
    assert not torch.equal(RandomSource(graph, 1).load("embed"), RandomSource(graph).load("embed"))
