"""What a group of compressed-tensors' config says of the weights of a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.frontend.quantized.packed_store import refuse_setting
from octavo.ir.errors import OctavoError

_METHOD = "compressed-tensors"
# Codes that can be read, by format: as they lie, or packed.
_PLAIN = (("int", 8), ("float", 8))
_WEIGHTS = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "mxfp4-pack-quantized": (("float", 4),),
}
_X = {("int", 8): "i8", ("float", 8): "f8e4m3"}


@dataclass(frozen=True)
class WeightSettings:
    """What codes are, the ``block`` that shares a scale, and what x may be rounded to."""

    form: str
    kind: Literal["int", "float"]
    bits: int
    block: tuple[int | None, int | None]
    is_symmetric: bool
    x: str | None = None
    x_block: int | None = None

    @classmethod
    def parse(cls, module: str, form: str, group: Mapping[str, Any]) -> WeightSettings:
        """The settings of a group of config_groups. Raises OctavoError."""
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise OctavoError(
                f"{module} is quantised, but its group in config.json has no weights; config.json"
                " and the weights are of different checkpoints"
            )
        kind, bits = str(weights.get("type", "int")), int(weights.get("num_bits", 8))
        if (kind, bits) not in _WEIGHTS.get(form, _PLAIN):
            raise refuse_setting(_METHOD, f"{form} weights of {kind}{bits}", "use int4 or 8 bits")
        x, x_block = _x(group.get("input_activations"))
        return cls(
            form,
            "int" if kind == "int" else "float",
            bits,
            _block(weights),
            bool(weights.get("symmetric", True)),
            x,
            x_block,
        )


def _block(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    if strategy is None:  # as the library infers it
        strategy = "tensor" if group is None else "group" if group > 0 else "channel"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group" and isinstance(group, int) and group > 0:
        return 1, group
    structure = weights.get("block_structure")
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
        return structure[0], structure[1]
    raise refuse_setting(_METHOD, f"weights by {strategy}", "use tensor, channel, group or block")


def _x(activations: Mapping[str, Any] | None) -> tuple[str | None, int | None]:
    """What x may be rounded to, and the columns that share a scale of it."""
    if not activations:
        return None, None
    kind, bits = str(activations.get("type", "int")), int(activations.get("num_bits", 8))
    if (kind, bits) not in _X:
        raise refuse_setting(_METHOD, f"activations of {kind}{bits}", "use int8 or float8")
    is_grouped = activations.get("strategy") in ("group", "tensor_group")
    return _X[kind, bits], activations.get("group_size") if is_grouped else None
