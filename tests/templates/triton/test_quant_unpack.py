"""The PTX that makes numbers of codes, run here for every word that there is.

The interpreter of Triton runs no PTX, so that the tests of whole kernels see what stands beside it.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from octavo.codegen.render import environment
from octavo.ir.quant_scheme import CODE_FORMATS
from octavo.ir.types import DTYPES

PIECES = {"int4": 4, "uint4": 4, "f4e2m1": 4, "f8e4m3": 2, "int8": 2, "int6": 2, "uint5": 2}
HALVES = {"bf16": (torch.bfloat16, 128), "f16": (torch.float16, 1024)}
WORDS = torch.arange(2**16)
_STATEMENT = re.compile(r"(\w+(?:\.\w+)*) ([^;]+);")


class Registers:
    """32-bit registers, each a tensor of int64 that holds the bits for all words at once."""

    def __init__(self, text: str, inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.values = dict(inputs)
        self._dtype = dtype
        for operation, operands in _STATEMENT.findall(text):
            if operation != "reg":
                goal, *sources = (part.strip() for part in operands.split(","))
                self.values[goal] = self._run(operation, [self._read(each) for each in sources])

    def _read(self, text: str) -> Tensor:
        return self.values[text] if text in self.values else torch.tensor(int(text, 0))

    def _run(self, operation: str, sources: list[Tensor]) -> Tensor:
        first = sources[0]
        if operation == "mov.b32":
            return first
        if operation == "shl.b32":
            return first << sources[1] & 0xFFFFFFFF
        if operation == "shr.u32":
            return first >> sources[1]
        if operation == "and.b32":
            return first & sources[1]
        if operation == "xor.b32":
            return first ^ sources[1]
        if operation == "lop3.b32":
            assert sources[3] == 0xEA, "the truth table of (a & b) | c"
            return (first & sources[1]) | sources[2]
        assert operation in ("fma.rn.bf16x2", "fma.rn.f16x2"), operation
        low, high = (self._fma([each >> at & 0xFFFF for each in sources]) for at in (0, 16))
        return low | high << 16

    def _fma(self, halves: list[Tensor]) -> Tensor:
        a, b, c = (as_numbers(half, self._dtype).double() for half in halves)
        rounded = (a * b + c).to(self._dtype)
        return rounded.view(torch.int16).long() & 0xFFFF


def as_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """16 bits as numbers of a dtype."""
    signed = torch.where(bits >= 2**15, bits - 2**16, bits)
    return signed.to(torch.int16).view(dtype)


def expected(codes: str, piece: int) -> Tensor:
    """The number of code ``piece`` of every word, by what the code format says; f64."""
    bits = 16 // PIECES[codes]
    fields = WORDS >> bits * piece & 2**bits - 1
    form = CODE_FORMATS[codes]
    if form.table:
        return torch.tensor(form.table, dtype=torch.float64)[fields]
    if codes == "int4":  # packed as code + 8
        return fields.double() - 8
    return fields.to(torch.uint8).view(DTYPES[form.dtype]).double()


@pytest.mark.parametrize("value", HALVES)
@pytest.mark.parametrize("codes", PIECES)
def test_every_word_gives_its_numbers(codes: str, value: str) -> None:
    pieces, dtype = PIECES[codes], HALVES[value][0]
    # The other half of the register holds another word.
    register = WORDS | WORDS.flip(0) << 16
    unpacked = Registers(_ptx(codes, value, pieces), {f"${pieces}": register}, dtype)
    for piece in range(pieces):
        want, bits = expected(codes, piece), unpacked.values[f"${piece}"]
        for found, numbers in ((bits & 0xFFFF, want), (bits >> 16, want.flip(0))):
            is_right = as_numbers(found, dtype).double() == numbers
            if codes == "f8e4m3":  # there is no NaN in a weight
                is_right |= numbers.isnan()
            elif codes == "uint5":  # nor a code above 31
                is_right |= numbers > 31
            assert bool(is_right.all())


@pytest.mark.parametrize("value", HALVES)
@pytest.mark.parametrize("codes", ["uint4", "uint5"])
@pytest.mark.parametrize("zero", [0, 1, 8, 15, 16])
def test_zeros_are_subtracted(codes: str, value: str, zero: int) -> None:
    pieces, (dtype, first) = PIECES[codes], HALVES[value]
    less = torch.tensor([-float(first + zero)], dtype=dtype).view(torch.int16).long() & 0xFFFF
    inputs = {f"${pieces}": WORDS}
    inputs |= {f"${pieces + 1 + piece}": less | less << 16 for piece in range(pieces)}
    unpacked = Registers(_ptx(codes, value, pieces, has_zeros=True), inputs, dtype)
    for piece in range(pieces):
        want = expected(codes, piece)
        found = as_numbers(unpacked.values[f"${piece}"] & 0xFFFF, dtype).double()
        assert bool(((found == want - zero) | (want > 31)).all())


def _ptx(codes: str, value: str, pieces: int, *, has_zeros: bool = False) -> str:
    macros = environment().get_template("triton/quant_unpack.j2").module
    text: str = macros.ptx(codes, value, pieces, has_zeros)  # type: ignore[attr-defined]
    return text
