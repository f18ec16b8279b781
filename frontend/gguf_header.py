"""The header of a GGUF file: metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package has a reader too, but it makes numpy objects of every string of the vocabulary:
3.3 s for 49152 tokens where this takes 0.1 s. Its tables of types and block sizes are used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.ir.errors import OctavoError

# struct's codes of the fixed-size metadata types.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: shape in torch's order (rows first), byte offset in the file, size in"
    " bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` holds Python values by GGUF key; arrays are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table, and check that the file holds every tensor to its last byte.

    Raises OctavoError naming the file when it is not GGUF, of another version, corrupt or cut
    short.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            return _read(path, _Reader(file, file_bytes, path.name), file_bytes)
    except OSError as error:
        raise OctavoError(f"{path.name} cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise OctavoError(
            f"{path.name} is corrupt: its header cannot be read ({str(error).splitlines()[0]});"
            " copy or download the file again"
        ) from error


def _read(path: Path, reader: _Reader, file_bytes: int) -> GgufHeader:
    if reader.take(4) != b"GGUF":
        raise OctavoError(f"{path.name} is not a GGUF file: it does not begin with 'GGUF'")
    version, num_tensors, num_keys = struct.unpack("<IQQ", reader.take(20))
    if version not in (2, 3):
        raise OctavoError(f"{path.name} is GGUF version {version}; expected 2 or 3, little-endian")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    entries = [reader.tensor_entry() for _ in range(num_tensors)]
    if "general.architecture" not in metadata:
        raise OctavoError(f"{path.name} states no general.architecture; it is not a language model")
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in entries:
        tensors[name] = _place(path, name, shape, type_id, data_start + offset)
        end = tensors[name].offset + tensors[name].num_bytes
        if end > file_bytes:
            raise OctavoError(
                f"{path.name} is cut short: tensor '{name}' ends at byte {end}, the file has"
                f" {file_bytes}; copy or download the file again"
            )
    return GgufHeader(path, metadata, tensors)


def _place(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
    if type_id not in GGML_QUANT_SIZES:
        raise OctavoError(
            f"{path.name}: tensor '{name}' has GGML type {type_id}, which is unknown to this"
            " version of the gguf package; upgrade gguf"
        )
    type_ = GGMLQuantizationType(type_id)
    block_elements, block_bytes = GGML_QUANT_SIZES[type_]
    if shape and shape[-1] % block_elements:
        raise OctavoError(
            f"{path.name} is corrupt: tensor '{name}' has rows of {shape[-1]}, which blocks of"
            f" {block_elements} ({type_.name}) do not divide"
        )
    return GgufTensor(name, shape, type_, offset, prod(shape) // block_elements * block_bytes)


class _Reader:
    """Reads the header's items in order and knows where it is."""

    def __init__(self, file: BufferedReader, file_bytes: int, file_name: str) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self._file_name = file_name
        self.position = 0

    def take(self, count: int) -> bytes:
        # Checked before reading: a corrupt length must not become an allocation of its size.
        if self.position + count > self._file_bytes:
            raise OctavoError(
                f"{self._file_name} is cut short: its header goes past byte {self._file_bytes},"
                " where the file ends; copy or download the file again"
            )
        self.position += count
        return self._file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array()
        raise ValueError(f"metadata of type {type_id}")

    def _array(self) -> list[Any]:
        element_type, count = struct.unpack("<IQ", self.take(12))
        if element_type in _SCALARS:
            code = _SCALARS[element_type]
            data = self.take(count * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", data))
        if element_type == _STRING:
            return [self.string() for _ in range(count)]
        raise ValueError(f"metadata array of type {element_type}")

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.scalar("I")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        type_id, offset = struct.unpack("<IQ", self.take(12))
        # GGML counts the fastest dimension first, torch last.
        return name, tuple(reversed(dims)), type_id, offset
