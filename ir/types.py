"""Types of the IR: dtypes, symbolic dimensions, tensors, quantised matrices, the KV state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.ir.kv_scheme import KVScheme
from octavo.ir.quant_scheme import QuantScheme

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e8m0": torch.float8_e8m0fnu,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, order=True)
class SymDim:
    """A dimension known only at run time: ``scale * symbol + offset``.

    Symbols in use: ``T`` tokens in the step, ``S`` sequences, ``B`` blocks in a block-table row,
    ``R`` rows of logits. Affine is enough: views merge (``4*T``), prefix sums add one (``S+1``).
    """

    symbol: str
    scale: int = 1
    offset: int = 0

    def __str__(self) -> str:
        head = self.symbol if self.scale == 1 else f"{self.scale}*{self.symbol}"
        return head if self.offset == 0 else f"{head}{self.offset:+d}"

    def at(self, sizes: Mapping[str, int]) -> int:
        """The dimension when the symbols have these sizes."""
        return self.scale * sizes[self.symbol] + self.offset


Dim = int | SymDim


def dim_at(dim: Dim, sizes: Mapping[str, int]) -> int:
    """A dimension as a number, for the given sizes of the symbols."""
    return dim if isinstance(dim, int) else dim.at(sizes)


@dataclass(frozen=True)
class TensorType:
    """A dense tensor: ``bf16[T, 64]``. ``dtype`` is a key of DTYPES."""

    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The PyTorch dtype."""
        return DTYPES[self.dtype]

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """True when no dimension is symbolic."""
        return all(isinstance(dim, int) for dim in self.shape)

    def sizes(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape as numbers, for the given sizes of the symbols."""
        return tuple(dim_at(dim, symbols) for dim in self.shape)

    def num_bytes(self, symbols: Mapping[str, int]) -> int:
        """Bytes of a contiguous tensor of this type."""
        return math.prod(self.sizes(symbols)) * self.torch_dtype.itemsize

    def with_shape(self, *shape: Dim) -> TensorType:
        """The same dtype with another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        """The same shape with another dtype."""
        return TensorType(dtype, self.shape)


@dataclass(frozen=True)
class QuantType:
    """A weight ``[N, K]`` held by a scheme: ``int4<1x128, bf16>[28672, 4096]``."""

    scheme: QuantScheme
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.scheme}[{', '.join(map(str, self.shape))}]"

    @property
    def dtype(self) -> str:
        """The scheme, where a tensor has its dtype."""
        return str(self.scheme)

    @property
    def rank(self) -> int:
        """The number of dimensions, two."""
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix, scales included."""
        return self.scheme.num_bytes(*self.shape)


@dataclass(frozen=True)
class SlotShape:
    """Shape of one K/V cache pair: KV heads, key dim, value dim."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        return f"[{self.num_kv_heads}, {self.head_dim}, {self.v_head_dim}]"


@dataclass(frozen=True)
class KVType:
    """The paged KV state: ``kv<f32, 30 x [3, 64, 64]>``, one slot for each attention call.

    With ``scales`` the dtype is that of codes, see KVScheme: ``kv<i8 token, 30 x [3, 64, 64]>``.
    """

    dtype: str
    slots: tuple[SlotShape, ...]
    scales: str | None = None

    def __str__(self) -> str:
        runs: list[tuple[int, SlotShape]] = []
        for slot in self.slots:
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0] + 1, slot)
            else:
                runs.append((1, slot))
        held = str(self.scheme or self.dtype)
        return ", ".join([f"kv<{held}", *(f"{count} x {slot}" for count, slot in runs)]) + ">"

    @property
    def scheme(self) -> KVScheme | None:
        """How codes stand for keys and values; None where they are held as they are."""
        return KVScheme(self.dtype, self.scales) if self.scales else None


Type = TensorType | QuantType | KVType


def tensor_type(value_type: Type) -> TensorType:
    """Narrow to a tensor type; anything else there is a mistake of ours."""
    assert isinstance(value_type, TensorType), f"expected a tensor, got {value_type}"
    return value_type
