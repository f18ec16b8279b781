"""The scales of heads of a KV cache, from a file or from the checkpoint itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.frontend.checkpoint import SafetensorsFile, open_checkpoint
from octavo.frontend.rounded_cache import HeadConstants
from octavo.frontend.source import ModelSource
from octavo.frontend.weights import TensorStore
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.types import KVType

# The same scale by the names that it goes by: compressed-tensors and vLLM, ModelOpt, and
# compressed-tensors before 0.6.
_SPELLINGS = {
    "k_scale": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "v_scale": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}
_CONSTANTS = (*_SPELLINGS, "k_offset")  # weights of the ops that write, by the ends of their keys


def load_kv_scales(graph: Graph, source: ModelSource, scales: str | Path) -> dict[str, Tensor]:
    """The scales that a graph's buffers ask for, ``{key: f32[Hk]}``; one of a layer is repeated.

    ``scales`` is ``checkpoint`` or a safetensors file with the same names, ``<module>.k_scale`` and
    ``<module>.v_scale``, of one number or one for each KV head. Raises OctavoError for a scale that
    is absent, of another shape, or not above zero and finite.
    """
    store, where = _store(source, scales)
    wanted = _scale_keys(graph).items()
    return {key: _scale(store, where, key, num_heads) for key, num_heads in wanted}


def head_constants(graph: Graph, buffers: Mapping[str, Tensor]) -> list[HeadConstants]:
    """The scales of heads and the offset of keys of each slot, in the order of the slots; empty if
    no slot has any."""
    found: dict[int, dict[str, Tensor]] = {}
    for node in graph.nodes:
        if not any(isinstance(value.type, KVType) for value in node.outputs):
            continue
        slot = found.setdefault(node.attrs["slot"], {})
        for value in node.operands:
            weight = graph.producer(value, "buffer") if value.is_weight else None
            name = "" if weight is None else weight.attrs["key"].rpartition(".")[2]
            if weight is not None and name in _CONSTANTS:
                slot[name] = buffers[weight.attrs["key"]]
    return [HeadConstants(**found[slot]) for slot in sorted(found)] if any(found.values()) else []


def _scale_keys(graph: Graph) -> dict[str, int]:
    """The buffers of a graph that are scales, in order, with their numbers of heads."""
    return {
        node.attrs["key"]: node.output.shape[0]
        for node in graph.weight_nodes
        if node.op == "buffer" and node.attrs["key"].rpartition(".")[2] in _SPELLINGS
    }


def _store(source: ModelSource, scales: str | Path) -> tuple[TensorStore, str]:
    if scales != "checkpoint":
        path = Path(scales)
        if not path.is_file():
            raise OctavoError(
                f"--kv-scales {path}: no such file; expected `checkpoint` or a safetensors file"
            )
        return SafetensorsFile(path), path.name
    if source.kind != "safetensors":
        raise OctavoError(
            f"{source.name} is no safetensors checkpoint, so it has no KV scales; give "
            "--kv-scales FILE, or leave it out"
        )
    return open_checkpoint(source.path), source.name


def _scale(store: TensorStore, where: str, key: str, num_heads: int) -> Tensor:
    name = _stored_name(store.names(), key)
    if name is None:
        raise OctavoError(
            f"{where} has no {key}: KV scales are absent; leave out --kv-scales for scales of 1 "
            "(FP8), or choose --kv-scale-per token"
        )
    scale = store.read(name).float().flatten()
    if scale.numel() not in (1, num_heads):
        raise OctavoError(
            f"{where}: {name} has {scale.numel()} scales; expected 1 or {num_heads}, one for each "
            "KV head"
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise OctavoError(
            f"{where}: {name} is {scale.tolist()}; expected scales that are above zero and finite; "
            "calibrate the model again, or leave out --kv-scales"
        )
    return scale.expand(num_heads).clone()


def _stored_name(names: Collection[str], key: str) -> str | None:
    module, _, scale = key.rpartition(".")
    spellings = (f"{module}.{spelling}" for spelling in _SPELLINGS[scale])
    return next((name for name in spellings if name in names), None)
