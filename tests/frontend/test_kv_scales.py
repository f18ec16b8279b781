"""What the writes of a graph say of its codes, for a cache of Hugging Face that rounds likewise."""

from __future__ import annotations

import torch

from octavo.frontend.kv_scales import head_constants
from octavo.frontend.rounded_cache import RoundedCache
from octavo.ir.graph import Graph
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.parser import parse_graph

_KV = "kv<f8e4m3 head, 2 x [2, 4, 4]>"


def graph(first: str, second: str) -> Graph:
    """Two slots, the second written first, with these operands behind the slot mapping."""
    return parse_graph(
        f"graph @m(%k: f32[T, 2, 4], %slots: i64[T], %kv: {_KV}) {{\n"
        '  weights {\n    @s: f32[2] = buffer(key="b.k_scale")\n'
        '    @t: f32[2] = buffer(key="b.v_scale")\n'
        '    @o: f32[2, 4] = buffer(key="b.k_offset")\n  }\n'
        f"  %kv~1: {_KV} = kv_write(%kv, %k, %k, %slots{second}, slot=1)\n"
        f"  %kv~2: {_KV} = kv_write(%kv~1, %k, %k, %slots{first}, slot=0)\n"
        "  return %kv~2\n}\n"
    )


BUFFERS = {
    "b.k_scale": torch.tensor([0.5, 0.25]),
    "b.v_scale": torch.tensor([2.0, 4.0]),
    "b.k_offset": torch.tensor([[5.0, -3.0, 0.1, 40.0], [1.0, 2.0, 3.0, 4.0]]),
}


def test_constants_stand_in_the_order_of_the_slots() -> None:
    first, second = head_constants(graph(", none, none, @o", ", @s, @t"), BUFFERS)
    assert (first.k_scale, first.v_scale) == (None, None)
    assert first.k_offset is BUFFERS["b.k_offset"]
    assert second.k_scale is BUFFERS["b.k_scale"]
    assert second.v_scale is BUFFERS["b.v_scale"]
    assert second.k_offset is None


def test_there_are_none_where_no_slot_has_any() -> None:
    """However often the model's own code asks for its cache, as layers may share a slot."""
    assert head_constants(graph("", ""), BUFFERS) == []


def test_the_cache_rounds_what_is_left_of_keys_and_nothing_of_values() -> None:
    heads = head_constants(graph(", none, none, @o", ", none, none, @o"), BUFFERS)
    offset = BUFFERS["b.k_offset"][None, :, None]
    k = (offset + 2.0**-4).expand(1, 2, 3, 4)  # a code, next to an offset that is none
    got, values = RoundedCache(KVScheme("f8e4m3", "head"), heads).update(k, k, 0)
    torch.testing.assert_close(got, k, rtol=0, atol=2.0**-20)
    assert float((values - k).abs().max()) > 2.0**-5, "values have no offset"
