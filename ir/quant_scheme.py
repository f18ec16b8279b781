"""How a quantised matrix is held: a scheme says it, and stands in the type of the matrix.

    int4<1x128, bf16>                 signed codes, a scale for each 128 columns of a row
    uint4<1x128, f16, zero=u8>        value = (code - zero) * scale
    uint4<1x32, f16, offset=f16>      value = code * scale + offset
    f8e4m3<128x128, f32, x=f8e4m3/128>
    int8<1x*, f32, x=i8>              one scale a row
    f4e2m1<1x32, f8e8m0>              the microscaling format of OCP, MXFP4

The angle brackets hold the block of rows by columns that share a scale (``*`` is all of them), the
scale's dtype, and what there is besides: of integers a ``zero=``, in the dtype of the codes, or an
``offset=``. ``x=`` permits a kernel to round the rows of the other
operand of a product to that dtype, with a scale for each row, or for each so many columns of it; a
kernel that keeps them whole is more exact and as right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.ir.errors import VerifyError

# Values of 4-bit codes that are no integers. e2m1: OCP Microscaling Formats (MX) Specification 1.0,
# table 5. nf4: QLoRA (Dettmers et al. 2023), appendix E.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class CodeFormat:
    """What a code is: its width in bits, the dtype in which codes lie unpacked, and its values.

    Integers are ``low`` to ``high``; a ``table`` gives the value of each code from 0 on.
    """

    bits: int
    dtype: str
    low: int = 0
    high: int = 0
    table: tuple[float, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether its values are floats, positive and negative ones."""
        return bool(self.table) or self.dtype == "f8e4m3"

    @property
    def largest(self) -> float:
        """The largest magnitude that codes reach on both sides of zero."""
        return max(self.table) if self.table else float(self.high)


CODE_FORMATS = {
    "int8": CodeFormat(8, "i8", -128, 127),
    "uint8": CodeFormat(8, "u8", 0, 255),
    "int6": CodeFormat(6, "i8", -32, 31),
    "uint5": CodeFormat(5, "u8", 0, 31),
    "int4": CodeFormat(4, "i8", -8, 7),
    "uint4": CodeFormat(4, "u8", 0, 15),
    "f8e4m3": CodeFormat(8, "f8e4m3", 0, 448),
    "f4e2m1": CodeFormat(4, "u8", table=(*_E2M1, *(-value for value in _E2M1))),
    "nf4": CodeFormat(4, "u8", table=_NF4),
}

_PARTS = re.compile(r"(\w+)<(\*|\d+)x(\*|\d+), (\w+)((?:, \w+=\w+(?:/\d+)?)*)>")


@dataclass(frozen=True)
class QuantScheme:
    """A way to hold a matrix ``[N, K]``; see the text forms above.

    ``codes`` is a key of CODE_FORMATS; ``block`` are the rows and columns that share a scale, None
    standing for all; ``scale``, ``zero`` and ``offset`` are dtypes; ``x`` is ``i8`` or ``f8e4m3``,
    ``x_block`` the columns that share a scale of x, None for the whole row.
    """

    codes: str
    block: tuple[int | None, int | None]
    scale: str
    zero: str | None = None
    offset: str | None = None
    x: str | None = None
    x_block: int | None = None

    def __str__(self) -> str:
        rows, columns = ("*" if size is None else size for size in self.block)
        block = "" if self.x_block is None else f"/{self.x_block}"
        parts = {"zero": self.zero, "offset": self.offset, "x": self.x and f"{self.x}{block}"}
        given = "".join(f", {name}={value}" for name, value in parts.items() if value)
        return f"{self.codes}<{rows}x{columns}, {self.scale}{given}>"

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """The scheme of a text form. Raises VerifyError."""
        match = _PARTS.fullmatch(text)
        if match is None or match[1] not in CODE_FORMATS:
            raise VerifyError(f"{text!r} is no quantisation scheme, such as int4<1x128, bf16>")
        parts = [part.split("=") for part in match[5].split(", ")[1:]]
        given = {name: value for name, value in parts}
        is_twice = len(given) < len(parts)
        x, _, x_block = given.pop("x", "").partition("/")
        if not given.keys() <= {"zero", "offset"} or len(given) > 1 or is_twice:
            raise VerifyError(
                f"{text!r}: a scheme has zero= or offset=, and x=, each once, besides its scale"
            )
        if "0" in (match[2], match[3], x_block):
            raise VerifyError(f"{text!r}: a block has at least one row and one column")
        _check_dtypes(text, match[4], x, **given)
        _check_integers(text, match[1], **given)
        return cls(
            match[1],
            (_size(match[2]), _size(match[3])),
            match[4],
            x=x or None,
            x_block=_size(x_block) if x_block else None,
            **given,
        )

    @property
    def format(self) -> CodeFormat:
        """What its codes are."""
        return CODE_FORMATS[self.codes]

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a matrix. Raises VerifyError unless whole blocks make it up,
        where a block is smaller than the matrix; the last of 128x128 blocks may be cut."""
        for name, size, block in zip("NK", (rows, columns), self.block, strict=True):
            is_group = self.block[0] == 1
            if block is not None and is_group and size % block:
                raise VerifyError(
                    f"{name}={size} is not a multiple of the group of {block} that {self} has;"
                    f" choose a group that divides {size}"
                )
        up, across = self.block
        return -(-rows // (up or rows)), -(-columns // (across or columns))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a packed matrix: codes, scales, zeros and offsets."""
        from octavo.ir.types import DTYPES

        scales = self.scale_shape(rows, columns)
        sides = [dtype for dtype in (self.scale, self.zero, self.offset) if dtype is not None]
        packed = 8 if self.format.bits > 4 else 4
        side_bytes = sum(DTYPES[dtype].itemsize for dtype in sides)
        return rows * columns * packed // 8 + scales[0] * scales[1] * side_bytes


def _check_dtypes(text: str, scale: str, x: str, zero: str = "u8", offset: str = "f32") -> None:
    from octavo.ir.types import DTYPES

    for dtype in (scale, zero, offset):
        if dtype not in DTYPES:
            raise VerifyError(f"{text!r}: {dtype} is none of the dtypes {', '.join(DTYPES)}")
    for dtype in (scale, offset):
        if not DTYPES[dtype].is_floating_point:
            raise VerifyError(f"{text!r}: scales and offsets are floats, not {dtype}")
    if x not in ("", "i8", "f8e4m3"):
        raise VerifyError(f"{text!r}: x= is i8 or f8e4m3")


def _check_integers(text: str, codes: str, zero: str | None = None, offset: str = "") -> None:
    """Zeros and offsets are of integer codes, and a zero is itself a code."""
    form = CODE_FORMATS[codes]
    if form.is_float and (zero or offset):
        raise VerifyError(
            f"{text!r}: codes of {codes} are floats on both sides of 0, and have no zero= and no"
            f" offset=; leave it out, or choose integers such as uint{form.bits}"
        )
    if zero is not None and zero != form.dtype:
        raise VerifyError(f"{text!r}: the zero= of {codes} is {form.dtype}, as its codes are")


def _size(text: str) -> int | None:
    return None if text == "*" else int(text)
