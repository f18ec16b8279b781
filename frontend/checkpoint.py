"""Safetensors checkpoints, single and sharded, one tensor in memory at a time.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian header
length, a JSON header, then the data. It is read here without the library because tensors the
library returns are views of a mapping of the whole file, which stays resident: streaming a shard
would then cost the shard.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from octavo.frontend.refused import NoWeights
from octavo.frontend.weights import TensorInfo
from octavo.ir.errors import OctavoError
from octavo.ir.safetensors_dtypes import SAFETENSORS_DTYPES

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The library's own bound on the header; a larger length is a corrupt file, not a large model.
_MAX_HEADER_BYTES = 100_000_000


class SafetensorsFile:
    """One .safetensors file; a TensorStore. The header is checked against the file's size at"
    " once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data_start, header, data_bytes = _read_header(path)
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._infos[name], self._offsets[name] = self._entry(name, entry, data_bytes)

    def _entry(self, name: str, entry: Any, data_bytes: int) -> tuple[TensorInfo, int]:
        try:
            shape = tuple(int(size) for size in entry["shape"])
            dtype_name = str(entry["dtype"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise _corrupt(self.path, f"the header entry of '{name}' is malformed") from None
        if dtype_name not in SAFETENSORS_DTYPES:
            raise OctavoError(
                f"{self.path.name}: tensor '{name}' has dtype {dtype_name}, which is not supported;"
                f" expected one of {', '.join(SAFETENSORS_DTYPES)}"
            )
        info = TensorInfo(shape, SAFETENSORS_DTYPES[dtype_name])
        if begin < 0 or end - begin != info.num_bytes:
            raise _corrupt(
                self.path,
                f"tensor '{name}' of shape {list(shape)} and dtype {dtype_name} needs"
                f" {info.num_bytes} bytes, its header gives it {end - begin}",
            )
        if end > data_bytes:
            raise OctavoError(
                f"{self.path.name} is cut short: tensor '{name}' ends at byte"
                f" {self._data_start + end}, the file has {self._data_start + data_bytes};"
                " copy or download the file again"
            )
        return info, begin

    def names(self) -> Collection[str]:
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        read_into(self.path, self._data_start + self._offsets[name], data)
        return data.view(info.dtype).reshape(info.shape)


class SafetensorsDirectory:
    """All safetensors of a checkpoint directory; a TensorStore over its shards."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self._home: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.names():
                if name in self._home:
                    raise OctavoError(
                        f"tensor '{name}' stands in both {self._home[name].path.name} and"
                        f" {file.path.name}; expected it once; remove the stray file"
                    )
                self._home[name] = file

    def names(self) -> Collection[str]:
        return self._home.keys()

    def info(self, name: str) -> TensorInfo:
        return self._home[name].info(name)

    def read(self, name: str) -> torch.Tensor:
        return self._home[name].read(name)


def open_checkpoint(directory: Path) -> SafetensorsDirectory:
    """Open the safetensors of a directory and check every header; reads no tensor data.

    Takes `model.safetensors.index.json` and the shards that it names, else `model.safetensors`,
    else the only `*.safetensors`. Raises OctavoError for a missing or cut shard, a corrupt header,
    an index that does not match its shards, and a directory with PyTorch pickles only.
    """
    if (directory / INDEX_NAME).is_file():
        return _open_sharded(directory)
    if (directory / SINGLE_NAME).is_file():
        return SafetensorsDirectory([SafetensorsFile(directory / SINGLE_NAME)])
    candidates = sorted(directory.glob("*.safetensors"))
    if len(candidates) == 1:
        return SafetensorsDirectory([SafetensorsFile(candidates[0])])
    if candidates:
        raise OctavoError(
            f"{directory.name} holds {len(candidates)} safetensors files and no {INDEX_NAME}"
            " to say which belong to the model; add the index"
        )
    if any(directory.glob("pytorch_model*.bin")):
        raise OctavoError(
            f"{directory.name} holds only pytorch_model.bin, a pickle, which can run code when it"
            " is read and is refused; convert it to safetensors (in transformers:"
            " from_pretrained(...).save_pretrained(...))"
        )
    raise NoWeights(
        f"{directory.name} holds no safetensors, expected {SINGLE_NAME} or {INDEX_NAME}"
    )


def _open_sharded(directory: Path) -> SafetensorsDirectory:
    weight_map = _read_index(directory / INDEX_NAME)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise OctavoError(
            f"{directory.name}: {len(missing)} of {len(shards)} shards that {INDEX_NAME} names are"
            f" missing ({_first_three(missing)}); download them again"
        )
    files = {shard: SafetensorsFile(directory / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard].names():
            raise OctavoError(
                f"{directory.name}: {INDEX_NAME} says that tensor '{name}' is in {shard}, which"
                " does not hold it; index and shards are of different checkpoints, download both"
                " again"
            )
    return SafetensorsDirectory(list(files.values()))


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        items = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _corrupt(path, "it is not JSON with a 'weight_map'") from None
    for shard in items.values():
        if Path(shard).name != shard:
            raise OctavoError(f"{path.name} names the shard '{shard}'; expected a plain file name")
    return items


def _read_header(path: Path) -> tuple[int, dict[str, Any], int]:
    """Where the data starts, the parsed header, and how many bytes of data the file has."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _corrupt(path, f"its header claims {header_bytes} of {file_bytes} bytes")
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise OctavoError(f"{path.name} cannot be read: {error.strerror}") from None
    except ValueError:
        raise _corrupt(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    return 8 + header_bytes, header, file_bytes - 8 - header_bytes


def read_into(path: Path, offset: int, data: torch.Tensor) -> None:
    """Fill `data` (uint8, one dimension) from the file; raises OctavoError when it ends early."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs, not numpy
    filled = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            # One read returns at most 2 GiB on Linux.
            while filled < len(view):
                count = file.readinto(view[filled:])
                if not count:
                    break
                filled += count
    except OSError as error:
        raise OctavoError(f"{path.name} cannot be read: {error.strerror}") from None
    if filled < len(view):
        raise OctavoError(
            f"{path.name} is cut short: expected {len(view)} bytes at {offset}, got {filled};"
            " copy or download the file again"
        )


def _corrupt(path: Path, what: str) -> OctavoError:
    return OctavoError(f"{path.name} is corrupt: {what}; copy or download the file again")


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
