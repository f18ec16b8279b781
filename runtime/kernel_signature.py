"""The signature of a kernel: the types of its parameters, as Triton and the driver want them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POINTER_ALIGNMENT = 16

# Element types: what Triton calls them, and what PyTorch does.
_ELEMENTS = {
    "bf16": ("bf16", torch.bfloat16),
    "f16": ("fp16", torch.float16),
    "f32": ("fp32", torch.float32),
    "f64": ("fp64", torch.float64),
    "f8e4m3": ("fp8e4nv", torch.float8_e4m3fn),
    "f8e5m2": ("fp8e5", torch.float8_e5m2),
    "i8": ("i8", torch.int8),
    "u8": ("u8", torch.uint8),
    "bool": ("i1", torch.bool),
    "i16": ("i16", torch.int16),
    "i32": ("i32", torch.int32),
    "i64": ("i64", torch.int64),
    "u32": ("u32", torch.uint32),
    "u64": ("u64", torch.uint64),
}
# Scalars: how `struct` packs one into the 8 bytes that each parameter gets.
_SCALARS = {"i32": "i4x", "i64": "q", "u32": "I4x", "u64": "Q", "f32": "f4x", "f64": "d"}
_PARAMETER = re.compile(r"(\w+)\s*:\s*(\*?)(\w+)(?:@(\d+))?")


@dataclass(frozen=True)
class Parameter:
    """One parameter: ``alignment`` in bytes of a pointer, or the divisor of an int."""

    name: str
    is_pointer: bool
    element: str
    alignment: int

    @property
    def triton_type(self) -> str:
        """Triton's name of the type: ``*fp32``."""
        return ("*" if self.is_pointer else "") + _ELEMENTS[self.element][0]

    @property
    def unaligned(self) -> str:
        """As a part of a signature, a pointer with no more alignment than its elements have."""
        if not self.is_pointer:
            return f"{self.name}: {self.element}" + f"@{self.alignment}" * (self.alignment > 1)
        size = _ELEMENTS[self.element][1].itemsize
        return f"{self.name}: *{self.element}@{min(self.alignment, size)}"

    @property
    def packing(self) -> str:
        """The 8 bytes of this parameter for ``struct``, little-endian, without alignment."""
        return "Q" if self.is_pointer else _SCALARS[self.element]

    def check(self, kernel: str, value: Any) -> None:
        """Raise ValueError for an argument that does not fit; addresses are not looked at."""
        if self.is_pointer:
            self._check_tensor(kernel, value)
        elif isinstance(value, Tensor) or not isinstance(value, int | float):
            raise ValueError(f"{kernel}: {self.name} is {type(value).__name__}, not {self.element}")
        elif isinstance(value, float) and self.element not in ("f32", "f64"):
            raise ValueError(f"{kernel}: {self.name} is a float, not {self.element}")
        elif self.alignment > 1 and value % self.alignment:
            raise ValueError(
                f"{kernel}: {self.name} = {value} is not a multiple of {self.alignment}, as the "
                "signature says"
            )

    def _check_tensor(self, kernel: str, value: Any) -> None:
        dtype = _ELEMENTS[self.element][1]
        if not isinstance(value, Tensor) or value.dtype != dtype:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{kernel}: {self.name} is {got}, not a tensor of {dtype}")
        offset = value.storage_offset() * value.element_size()
        if value.is_meta and offset % self.alignment:
            raise ValueError(
                f"{kernel}: {self.name} begins {offset} bytes into its storage, which is no "
                f"multiple of {self.alignment}; align it or write *{self.element}@BYTES"
            )


def parse_signature(text: str) -> tuple[Parameter, ...]:
    """Parameters of ``x_ptr: *bf16, y_ptr: *f32@4, num_rows: i32, stride: i32@16``.

    Raises ValueError, naming the part that is no parameter.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(_parse_parameter(part) for part in parts)


def _parse_parameter(text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a parameter like 'x_ptr: *bf16' or 'num_rows: i32'")
    name, star, element, alignment = match.groups()
    if element not in (_ELEMENTS if star else _SCALARS):
        known = ", ".join(_ELEMENTS if star else _SCALARS)
        raise ValueError(f"{text!r}: unknown type {element!r}; choose from {known}")
    default = POINTER_ALIGNMENT if star else 1
    return Parameter(name, bool(star), element, int(alignment or default))
