"""Casts that lose nothing: half-precision values that a model widens to compute in f32."""

from __future__ import annotations

from octavo.ir.graph import Value


def before_widening(value: Value) -> Value:
    """The bf16 or f16 value that was cast to this f32 one; the value itself if there is none."""
    cast = value.producer
    if cast is None or cast.op != "cast" or value.dtype != "f32":
        return value
    return cast.operand(0) if cast.operand(0).dtype in ("bf16", "f16") else value
