"""Triton's interpreter, made right for bfloat16, which it holds as uint16.

Left alone, its `tl.dot`, its arithmetic and its comparisons work on those raw bits, its casts cut
off instead of rounding to nearest even, and it has no bfloat16 constants. When it rounds to 8-bit
floats, it loses the carry into the exponent. Its scalars are arrays of one element, which NumPy
from 2.4 on takes for no bounds of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

Handle = interpreter.TensorHandle


def install() -> None:
    """Patch `InterpreterBuilder`, once a process."""
    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: _rounded(np.array([value], np.float32))
        builder.create_dot = _with_widened_operands(builder.create_dot)
        builder.binary_op = _rounding_results(builder.binary_op)
        builder.cast_impl = _casting(builder.cast_impl)
        builder.create_fp_to_fp = _to_e4m3(builder.create_fp_to_fp)
        interpreter._patch_lang_tensor = _with_bounds(interpreter._patch_lang_tensor)
        libdevice.fast_logf = lambda x: tl.log(x)  # it runs no external functions


def _with_bounds(patch_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _with_widened_operands(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _widened(a), _widened(b), *rest)

    return patched


def _rounding_results(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_bf16(lhs):
            return binary_op(self, lhs, rhs, op)
        result = op(_widened(lhs).data, _widened(rhs).data)
        return Handle(result, tl.int1) if result.dtype == bool else _rounded(result)

    return patched


def _casting(cast_impl: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, source: Any, goal: Any) -> Any:
        if _is_bf16(source) and goal.scalar == tl.bfloat16:
            return source
        widened = _widened(source)
        if goal.scalar == tl.bfloat16:
            return _rounded(widened.data.astype(np.float32))
        return cast_impl(self, widened, goal)

    return patched


def _to_e4m3(create_fp_to_fp: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, source: Any, goal: Any, *rest: Any) -> Any:
        if goal.scalar != tl.float8e4nv:
            return create_fp_to_fp(self, source, goal, *rest)
        values = torch.from_numpy(np.array(_widened(source).data, np.float32))
        # A GPU saturates, and rounds ties to even.
        codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return Handle(codes.view(torch.uint8).numpy(), goal.scalar)

    return patched


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    """A bfloat16 handle in float32, any other as it is."""
    if not _is_bf16(handle):
        return handle
    bits = np.asarray(handle.data).astype(np.uint32) << 16
    return Handle(bits.view(np.float32), tl.float32)


def _rounded(values: Any) -> Any:
    """Float32 to the nearest bfloat16, ties to even; a NaN stays one."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return Handle(np.where(np.isnan(values), quiet, nearest).astype(np.uint16), tl.bfloat16)
