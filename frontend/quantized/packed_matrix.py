"""A matrix as a quantised checkpoint stores it, in parts, and what every format checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor

from octavo.frontend.weights import TensorInfo, TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPE_NAMES

# What libraries that pack words of integers store scales in.
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PackedMatrix(ABC):
    """A weight ``[N, K]`` under its name in the model, made of tensors of a store.

    ``parts`` are the names of those tensors: they are used by this weight and by nothing else.
    """

    def __init__(self, store: TensorStore, name: str, parts: Collection[str]) -> None:
        self.store = store
        self.name = name
        self.parts = tuple(parts)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """N and K, from the shapes of the parts. Raises OctavoError where these do not fit."""

    @abstractmethod
    def scheme(self) -> QuantScheme | None:
        """How it is held; None where no scheme can say it. May read small tensors."""

    @abstractmethod
    def read(self) -> QuantTensor:
        """Codes and scales, checked, with the columns in the order of `columns`.

        Raises OctavoError naming the tensor that is wrong.
        """

    def columns(self) -> Tensor | None:
        """i64[K]: the model's columns in the order in which `read` has them; None: as they are."""
        return None

    def dequantize(self) -> Tensor:
        """What it stands for, f32 in the model's own order of columns."""
        matrix = self.read().dequantize()
        columns = self.columns()
        if columns is None:
            return matrix
        return torch.empty_like(matrix).index_copy_(1, columns, matrix)


def part_info(store: TensorStore, name: str, of: str) -> TensorInfo:
    """Shape and dtype of a part. Raises OctavoError where the checkpoint lacks it."""
    if name not in store.names():
        raise OctavoError(
            f"{name} is missing: {of} is quantised and cannot be read without it; the checkpoint"
            " is incomplete, download or export it again"
        )
    return store.info(name)


def check_part(
    store: TensorStore,
    name: str,
    of: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtypes: Collection[torch.dtype],
) -> None:
    """Raise OctavoError unless a part is there, of the shape and of one of the dtypes."""
    info = part_info(store, name, of)
    if info.dtype not in dtypes:
        wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise OctavoError(
            f"{name} is stored as {dtype_name(info.dtype)}, expected {wanted}; config.json and the"
            " weights are of different checkpoints, or the format is a variant that is not known"
        )
    if shape is not None and info.shape != shape:
        raise OctavoError(
            f"{name} has the shape {list(info.shape)}, expected {list(shape)} for {of}; check"
            " bits and group size in config.json"
        )


def check_group(name: str, columns: int, group: int | None) -> None:
    """Raise OctavoError unless a group divides K."""
    if group is not None and (group < 1 or columns % group):
        raise OctavoError(
            f"{name}: K={columns} is not a multiple of the group of {group}; quantise the model"
            f" with a group size that divides {columns}"
        )


def check_scales(name: str, scales: Tensor, *, zero_is_sound: bool = False) -> None:
    """Raise OctavoError for a scale that is NaN, infinite or, unless sound, zero."""
    wide = scales.float()
    for kind, bad in (
        ("NaN", wide.isnan()),
        ("infinite", wide.isinf()),
        ("zero", wide == 0),
    ):
        count = int(bad.sum())
        if count and not (kind == "zero" and zero_is_sound):
            raise OctavoError(
                f"{name}: {count} of {wide.numel()} scales are {kind}, expected finite numbers"
                " other than zero; the checkpoint is damaged, download or export it again"
            )


def checked(matrix: QuantTensor) -> QuantTensor:
    """The matrix, after a check of our own reading."""
    matrix.check()
    return matrix


def dtype_name(dtype: torch.dtype) -> str:
    """As the IR calls it, or PyTorch where the IR has none."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """Codes of int32 words, the lowest bits first along a dimension: u8, ``32 // bits`` as long."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = [((words >> shift) & (2**bits - 1)).to(torch.uint8) for shift in shifts]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def nibbles(packed: Tensor, *, low_first: bool) -> Tensor:
    """Codes of 4 bits from bytes, along the last dimension: u8, twice as long."""
    low, high = packed & 15, packed >> 4
    pair = (low, high) if low_first else (high, low)
    return torch.stack(pair, -1).flatten(-2)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Codes u8 that count from the most negative one, as i8."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def sort_columns(name: str, groups: Tensor, group: int) -> Tensor | None:
    """The order of columns in which each group stands together, i64[K]; None: they do already.

    ``groups`` is GPTQ's g_idx: the group of each column. Raises OctavoError where groups are not
    all of one size.
    """
    columns = groups.numel()
    groups = groups.long()
    together = torch.arange(columns) // group
    if torch.equal(groups, together):
        return None
    order: Tensor = groups.argsort(stable=True)
    if not torch.equal(groups[order], together):
        raise OctavoError(
            f"{name}: expected each of {columns // group} groups to have {group} columns; the"
            " checkpoint is damaged, download or export it again"
        )
    return order
