"""The one registry of ops. Importing this package declares them all."""

from octavo.ir.ops import (
    attention,
    constant,
    elementwise,
    fused,
    linear,
    norm,
    paged,
    pointwise,
    quant,
    rotary,
    shape,
)
from octavo.ir.ops.registry import OpDef, freeze, infer_types, op_def, registered_ops, resolve

__all__ = [
    "OpDef",
    "attention",
    "constant",
    "elementwise",
    "freeze",
    "fused",
    "infer_types",
    "linear",
    "norm",
    "op_def",
    "paged",
    "pointwise",
    "quant",
    "registered_ops",
    "resolve",
    "rotary",
    "shape",
]
