"""Tokens that meet outside attention are found and named."""

from __future__ import annotations

import pytest
import torch

from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.tokenwise import check_tokenwise
from octavo.ir.parser import parse_graph
from octavo.ir.weight_cache import WeightCache


class _Random:
    def load(self, key: str) -> torch.Tensor:
        return torch.randn(50, 8, generator=torch.Generator().manual_seed(0))

    def buffer(self, key: str) -> torch.Tensor:
        raise KeyError(key)


def check(body: str) -> None:
    graph = parse_graph(
        f"""graph @toy(%ids: i64[1, T], %positions: i64[1, T]) {{
  weights {{
    @table: f32[50, 8] = checkpoint(key="table")
  }}
  %x: f32[1, T, 8] = embedding(%ids, @table)
  {body.strip()}
  return %y
}}
"""
    )
    check_tokenwise(graph, WeightCache(graph, _Random()), max_position=64, num_ids=50)


def test_tokens_that_meet_only_in_attention_pass() -> None:
    check(
        """
  %h: f32[1, T, 2, 4] = reshape(%x, shape=[1, T, 2, 4])
  %t: f32[1, 2, T, 4] = transpose(%h, dim0=1, dim1=2)
  %a: f32[1, T, 2, 4] = attention(%t, %t, %t, scale=0.5)
  %y: f32[1, T, 8] = reshape(%a, shape=[1, T, 8])
"""
    )


@pytest.mark.parametrize(
    ("body", "op"),
    [
        ("%y: f32[1, T, 8] = aten.cumsum.default(%x, dim=1)", "aten.cumsum.default"),
        ("%y: f32[1, T, 8] = aten.softmax.int(%x, dim=1)", "aten.softmax.int"),
        ("%y: f32[1, T, 8] = aten.roll.default(%x, shifts=[1], dims=[1])", "aten.roll.default"),
        (
            "%m: f32[1, 1, 8] = aten.mean.dim(%x, dim=[1], keepdim=true)\n"
            "  %y: f32[1, T, 8] = sub(%x, %m)",
            "aten.mean.dim",
        ),
        (
            "%n: i64[T] = aten.arange.default(end=T)\n"
            "  %w: f32[T, 8] = embedding(%n, @table)\n"
            "  %y: f32[1, T, 8] = add(%x, %w)",
            "aten.arange.default",
        ),
    ],
)
def test_the_first_operation_that_mixes_tokens_is_named(body: str, op: str) -> None:
    with pytest.raises(RefusedArchitecture, match=op):
        check(body)


def test_a_count_of_rows_that_changes_nothing_is_allowed() -> None:
    check(
        "%n: i64[T] = aten.arange.default(end=T)\n"
        "  %y: f32[1, T, 8] = aten.index.Tensor(%x, %n, indices=[none, $1])"
    )
