"""What a layout packs it also unpacks, and it says the shapes without the numbers."""

from __future__ import annotations

import pytest
import torch

from octavo.codegen.quant_layouts import LAYOUTS, find_layout
from octavo.codegen.triton_layouts import why_no_kernel
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, quantize
from octavo.ir.types import DTYPE_NAMES, QuantType

EVERY = (
    "int8<1x*, f32, x=i8>",
    "int8<1x32, f16>",
    "int6<1x16, f16>",
    "uint5<1x32, f16, offset=f16>",
    "f8e4m3<*x*, f32, x=f8e4m3>",
    "f8e4m3<128x128, f32, x=f8e4m3/128>",
)
FOUR_BITS = (
    "int4<1x32, bf16>",
    "uint4<1x32, f16, zero=u8>",
    "uint4<1x32, f16, offset=f16>",
    "f4e2m1<1x32, f8e8m0>",
    "nf4<1x32, f32>",
    "int4<1x*, f32>",
)
CASES = [
    *(("plain", scheme) for scheme in (*EVERY, *FOUR_BITS)),
    *(("nibbles", scheme) for scheme in FOUR_BITS),
    *(
        ("triton", scheme)
        for scheme in (*EVERY, *FOUR_BITS)
        if not why_no_kernel(QuantScheme.parse(scheme))
    ),
]


def sample(text: str, rows: int, columns: int) -> QuantTensor:
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(rows, columns, generator=generator), QuantScheme.parse(text))


def test_every_layout_is_tried() -> None:
    assert {name for name, _ in CASES} == set(LAYOUTS)


@pytest.mark.parametrize(("name", "scheme"), CASES)
@pytest.mark.parametrize("rows", [1, 5])
def test_packing_loses_nothing(name: str, scheme: str, rows: int) -> None:
    layout = find_layout(name)
    # A whole row may be of odd length.
    matrix = sample(scheme, rows, 65 if "x*" in scheme else 96)
    packed = layout.pack(matrix)
    assert list(packed)[:2] == ["codes", "scales"]
    kind = QuantType(matrix.scheme, matrix.shape)
    found = layout.unpack(packed, kind)
    found.check()
    for (part, one), (_, other) in zip(found.parts(), matrix.parts(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), part
    declared = layout.part_types(kind)
    assert {n: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in packed.items()} == {
        n: (t.dtype, t.shape) for n, t in declared.items()
    }


def test_nibbles_are_two_in_a_byte_the_even_column_in_the_lower_half() -> None:
    codes = torch.tensor([[-8, 7, 1, -1]], dtype=torch.int8)
    matrix = QuantTensor(QuantScheme.parse("int4<1x4, f32>"), codes, torch.ones(1, 1))
    packed = find_layout("nibbles").pack(matrix)
    assert packed["codes"].tolist() == [[0x78, 0xF1]]
