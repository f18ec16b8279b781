"""Writing the weights that a step uses: one at a time, into shards of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.codegen.quant_layouts import find_layout
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph, Value
from octavo.ir.ops.quant import QUANT_SOURCED
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import Dim, QuantType, TensorType
from octavo.ir.weight_cache import WeightCache, WeightSource

SHARD_BYTES = 256 * 1024 * 1024
# The cache of evaluated weights holds what several weights are made from; small, since the largest
# weight and one shard are in memory besides.
_CACHE_BYTES = 64 * 1024 * 1024

Progress = Callable[[int, int], None]  # weights written, weights in all


@dataclass
class WeightWriter:
    """Collects tensors into ``NNNNN.safetensors`` and says in ``index.json`` where each is."""

    folder: Path
    shard_bytes: int = SHARD_BYTES
    weight_map: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[str, tuple[Dim, ...]]] = field(default_factory=dict)
    num_bytes: int = 0
    _pending: dict[str, Tensor] = field(default_factory=dict)
    _pending_bytes: int = 0
    _num_shards: int = 0

    def declare(self, name: str, tensor: TensorType) -> None:
        """Say the shape of a tensor that is left out."""
        self.shapes[name] = (str(tensor.torch_dtype).removeprefix("torch."), tensor.shape)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; writes a shard first when this one would make it too large."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.num_bytes += size

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._flush()
        index: dict[str, Any] = {"weight_map": dict(sorted(self.weight_map.items()))}
        if self.shapes:
            index["shapes"] = dict(sorted(self.shapes.items()))
        path = self.folder / "index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        self._num_shards += 1
        shard = f"{self._num_shards:05}.safetensors"
        save_file(self._pending, self.folder / shard)
        self.weight_map.update(dict.fromkeys(self._pending, shard))
        self._pending.clear()
        self._pending_bytes = 0


def write_weights(
    graph: Graph,
    source: WeightSource,
    folder: Path,
    *,
    layouts: Mapping[Value, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    without_checkpoint: bool = False,
) -> int:
    """Evaluate and write every weight that the step reads; returns the bytes written.

    ``layouts`` says how quantised weights are packed: ``w`` is then written as ``w.codes``,
    ``w.scales`` and so on. Peak memory is about one shard and one tensor. ``without_checkpoint``:
    of weights that depend on the checkpoint only the shapes are written, the others (position
    tables) are written as ever.
    Raises OctavoError for a weight with a NaN or an infinity, naming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache = WeightCache(graph, source, limit_bytes=_CACHE_BYTES)
    writer = WeightWriter(folder, shard_bytes)
    used = graph.used_weights()
    absent = _from_checkpoint(graph) if without_checkpoint else frozenset()
    for index, value in enumerate(used):
        layout = (layouts or {}).get(value)
        if value in absent:
            for name, part_type in _declared(value, layout):
                writer.declare(name, part_type)
            continue
        for name, tensor in _parts(value, cache.get(value), layout):
            check_finite(name, tensor)
            # A literal or a slice may share memory with another weight, and a shard may not.
            writer.add(name, tensor.clone() if _is_view(tensor) else tensor)
        if progress is not None:
            progress(index + 1, len(used))
    writer.finish()
    return writer.num_bytes


class WrittenWeights(Mapping[str, Tensor]):
    """The tensors that ``write_weights`` wrote, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        self._shard_of: dict[str, str] = index["weight_map"]
        self._folder = folder

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._folder / self._shard_of[name], framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)


def _declared(value: Value, layout: str | None) -> Iterator[tuple[str, TensorType]]:
    """Names and types of the tensors that a weight is stored as."""
    if not isinstance(value.type, QuantType):
        yield value.name, value.tensor
        return
    assert layout is not None, f"no kernel reads {value}"
    for part, part_type in find_layout(layout).part_types(value.type).items():
        yield f"{value.name}.{part}", part_type


def _parts(
    value: Value, held: Tensor | QuantTensor, layout: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight is stored as, by name."""
    if not isinstance(held, QuantTensor):
        yield value.name, held
        return
    assert layout is not None, f"no kernel reads {value}"
    for part, tensor in find_layout(layout).pack(held).items():
        yield f"{value.name}.{part}", tensor


def _from_checkpoint(graph: Graph) -> frozenset[Value]:
    """The weights that cannot be evaluated without the checkpoint."""
    found: set[Value] = set()
    for node in graph.weight_nodes:
        if node.op in ("checkpoint", *QUANT_SOURCED) or not found.isdisjoint(node.operands):
            found.update(node.outputs)
    return frozenset(found)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise OctavoError when a floating-point weight has a NaN or an infinity."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return
    # In pieces: the mask of a whole embedding would be large.
    for piece in torch.split(tensor.flatten(), 1 << 24):
        if not bool(torch.isfinite(piece).all()):
            kind = "a NaN" if bool(torch.isnan(piece).any()) else "an infinity"
            raise OctavoError(
                f"the weight {name} holds {kind}; the checkpoint is damaged, "
                "download or export it again"
            )


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
