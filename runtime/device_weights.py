"""Weights in one block of device memory: read from shards as fast as they come, or dummies.

One block, since an allocation for each tensor would round some hundred sizes up to 2 MiB, which no
memory plan could foresee. In it every tensor begins at a multiple of 256 bytes.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.ir.safetensors_dtypes import SAFETENSORS_DTYPES
from octavo.runtime.artifact import Artifact, read_json_object
from octavo.runtime.artifact_files import RECOMPILE
from octavo.runtime.errors import ArtifactError

_ALIGNMENT = 256
_PIECE_BYTES = 32 * 2**20
_NUM_THREADS = 8
_CODES = (torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn)  # of quantised weights
_BELOW_TWO = 0xBF  # the bits of an e4m3 without the one that makes it large, or no number
_SMALL_POWER = 121  # 2**-6 as an e8m0
_DUMMY_STD = 0.02  # as most models are initialised: activations stay finite through all layers


@dataclass(frozen=True)
class StoredWeight:
    """A weight's type, and where its bytes are; ``path`` None for one that is not stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path | None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored_weights(artifact: Artifact) -> dict[str, StoredWeight]:
    """All weights of an artifact. Raises ArtifactError for an index or a shard that is damaged."""
    name = "weights/index.json"
    if name not in artifact.manifest.files:
        raise ArtifactError(f"{artifact.root}: the manifest lists no {name}; {RECOMPILE}")
    index = read_json_object(artifact.root / name)
    found: dict[str, StoredWeight] = {}
    for shard in sorted(set(index.get("weight_map", {}).values())):
        if f"weights/{shard}" not in artifact.manifest.files:
            raise ArtifactError(
                f"{artifact.root}: {name} names {shard!r}, which the manifest does not list"
            )
        found |= shard_header(artifact.root / "weights" / shard)
    for weight, (dtype, shape) in index.get("shapes", {}).items():
        found[weight] = StoredWeight(getattr(torch, dtype), tuple(shape), None)
    return found


def shard_header(path: Path) -> dict[str, StoredWeight]:
    """The header of a safetensors file: its length as u64, then JSON. Raises ArtifactError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        header.pop("__metadata__", None)
        start = 8 + length
        return {
            name: StoredWeight(
                SAFETENSORS_DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                path,
                start + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error!r}; {RECOMPILE}") from None


def packed_bytes(weights: Mapping[str, StoredWeight]) -> int:
    """Bytes of the block that holds them all."""
    return sum(-(-weight.num_bytes // _ALIGNMENT) * _ALIGNMENT for weight in weights.values())


def load_weights(
    weights: Mapping[str, StoredWeight], device: torch.device, *, dummy: bool
) -> dict[str, Tensor]:
    """Tensors by name on a device. ``dummy``: random ones for floats and codes, zeros for others.

    Weights that are not stored are made only with ``dummy``; those that are stored beside such
    ones (position tables) are read all the same. Raises ArtifactError.
    """
    absent = [name for name, weight in weights.items() if weight.path is None]
    if absent and not dummy:
        raise ArtifactError(
            f"the artifact was compiled without weights ({absent[0]!r} and others are absent); "
            "load it with load_format='dummy', or compile it again with the weights"
        )
    block = torch.empty(packed_bytes(weights), dtype=torch.uint8, device=device)
    views, start = {}, 0
    for name, weight in weights.items():
        flat = block[start : start + weight.num_bytes]
        views[name] = flat.view(weight.dtype).view(weight.shape)
        start += -(-weight.num_bytes // _ALIGNMENT) * _ALIGNMENT
    made = set(absent or weights) if dummy else set()
    generator = torch.Generator(device).manual_seed(0)
    for name in sorted(made):
        _fill(views[name], generator)
    _read_all({name: weights[name] for name in weights.keys() - made}, views, device)
    return views


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor.normal_(0.0, _DUMMY_STD, generator=generator)
        return
    bits = tensor.view(torch.uint8)
    if tensor.dtype in _CODES:
        bits.random_(generator=generator)
        if tensor.dtype == torch.float8_e4m3fn:
            bits.bitwise_and_(_BELOW_TWO)
    else:
        bits.fill_(_SMALL_POWER if tensor.dtype == torch.float8_e8m0fnu else 0)


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file and where they go."""

    path: Path
    offset: int
    target: Tensor


def _pieces(weights: Mapping[str, StoredWeight], views: Mapping[str, Tensor]) -> Iterator[_Piece]:
    """In the order of the files, so that a disk reads ahead."""
    stored = sorted(weights.items(), key=lambda item: (str(item[1].path), item[1].offset))
    for name, weight in stored:
        assert weight.path is not None
        if not weight.num_bytes:
            continue
        flat = views[name].view(-1).view(torch.uint8)
        for start in range(0, weight.num_bytes, _PIECE_BYTES):
            yield _Piece(weight.path, weight.offset + start, flat[start : start + _PIECE_BYTES])


class _Reader:
    """One thread's staging memory: one half is read into while the other is copied from."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._halves = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)
        ]
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def read(self, piece: _Piece) -> None:
        self._halves.reverse()
        self._copied.reverse()
        half = self._halves[0][: len(piece.target)]
        if self._stream is None:
            _read_into(piece, half)
            with torch.inference_mode():
                piece.target.copy_(half)
            return
        self._copied[0].synchronize()
        _read_into(piece, half)
        # The mode belongs to a thread, and whoever asked for the weights may be in it.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            piece.target.copy_(half, non_blocking=True)
            self._copied[0].record()


def _read_into(piece: _Piece, half: Tensor) -> None:
    view = half.numpy().data
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ArtifactError(f"{piece.path} ends too early; {RECOMPILE}")
            done += count


def _read_all(
    weights: Mapping[str, StoredWeight], views: Mapping[str, Tensor], device: torch.device
) -> None:
    """Read in parallel: one thread does not keep up with an NVMe disk, nor with the page cache."""
    readers = threading.local()

    def read(piece: _Piece) -> None:
        if not hasattr(readers, "reader"):
            readers.reader = _Reader(device)
        readers.reader.read(piece)

    count = min(_NUM_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, thread_name_prefix="weights") as pool:
        for _ in pool.map(read, _pieces(weights, views)):
            pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
