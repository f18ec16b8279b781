"""Types: the algebra of dims, sizes, and how they print."""

from __future__ import annotations

import pytest

from octavo.ir.types import KVType, SlotShape, SymDim, TensorType, dim_at


@pytest.mark.parametrize(
    ("dim", "text", "at_7"),
    [
        (SymDim("T"), "T", 7),
        (SymDim("T", 4), "4*T", 28),
        (SymDim("T", 1, 1), "T+1", 8),
        (SymDim("T", 2, -3), "2*T-3", 11),
    ],
)
def test_dims_print_and_evaluate(dim, text, at_7):
    assert str(dim) == text
    assert dim_at(dim, {"T": 7}) == at_7


def test_a_tensor_type_knows_its_sizes():
    tensor = TensorType("bf16", (SymDim("T"), 64))
    assert str(tensor) == "bf16[T, 64]"
    assert tensor.sizes({"T": 3}) == (3, 64)
    assert tensor.num_bytes({"T": 3}) == 3 * 64 * 2
    assert not tensor.is_static
    assert TensorType("i64", ()).is_static
    assert str(TensorType("i64", ())) == "i64[]"


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([(3, 64, 64)] * 30, "kv<f32, 30 x [3, 64, 64]>"),
        ([(3, 64, 64)], "kv<f32, 1 x [3, 64, 64]>"),
        (
            [(1, 8, 8), (1, 8, 8), (2, 8, 4), (1, 8, 8)],
            "kv<f32, 2 x [1, 8, 8], 1 x [2, 8, 4], 1 x [1, 8, 8]>",
        ),
        ([], "kv<f32>"),
    ],
)
def test_kv_slots_print_as_runs(slots, text):
    assert str(KVType("f32", tuple(SlotShape(*slot) for slot in slots))) == text
