"""ATen calls that only rearrange, one small function each; see aten_rules.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.frontend.aten_call import AtenCall
from octavo.frontend.sizes import plus
from octavo.ir.graph import Value
from octavo.ir.types import Dim

_END = 2**62  # slices that go to the end carry the largest integer


def _reshape(call: AtenCall) -> Value | None:
    """Any view: the trace knows the resulting shape, so no dim is left to work out."""
    x, shape = call.tensor("self"), call.result_type.shape
    return x if x.shape == shape else call.emit("reshape", x, shape=shape)


def _expand(call: AtenCall) -> Value | None:
    x, shape = call.tensor("self"), call.result_type.shape
    return x if x.shape == shape else call.emit("expand", x, shape=shape)


def _repeat(call: AtenCall) -> Value | None:
    return call.tensor("self") if call.result_type == call.tensor("self").type else None


def _transpose(call: AtenCall) -> Value | None:
    return _swap(call, call["dim0"], call["dim1"])


def _turn(call: AtenCall) -> Value | None:
    return _swap(call, 0, 1) if call.tensor("self").tensor.rank == 2 else None


def _swap(call: AtenCall, dim0: int, dim1: int) -> Value:
    x = call.tensor("self")
    dim0, dim1 = sorted((dim0 % x.tensor.rank, dim1 % x.tensor.rank))
    return x if dim0 == dim1 else call.emit("transpose", x, dim0=dim0, dim1=dim1)


def _permute(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    dims = tuple(dim % x.tensor.rank for dim in call["dims"])
    return x if dims == tuple(range(x.tensor.rank)) else call.emit("permute", x, dims=dims)


def _unsqueeze(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    return call.emit("unsqueeze", x, dim=call["dim"] % (x.tensor.rank + 1))


def _squeeze(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    given = call.arguments.get("dim", range(x.tensor.rank))
    dims = [given] if isinstance(given, int) else given
    for dim in sorted({dim % x.tensor.rank for dim in dims}, reverse=True):
        if x.shape[dim] == 1:
            x = call.emit("squeeze", x, dim=dim)
    return x


def _slice(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    dim = call["dim"] % x.tensor.rank
    size = x.shape[dim]
    start = _bound(call, "start", 0, size)
    end = _bound(call, "end", size, size)
    if (start, end, call["step"]) == (0, size, 1):
        return x
    return call.emit("slice", x, dim=dim, start=start, end=end, step=call["step"])


def _bound(call: AtenCall, name: str, default: Dim, size: Dim) -> Dim:
    """A slice's bound counted from the start; only a static size can be clamped to."""
    if call[name] is None:
        return default
    bound = call.dim(name)
    if isinstance(bound, int) and bound < 0:
        bound = plus(size, bound)
    if isinstance(bound, int) and bound >= _END:
        return size
    if isinstance(bound, int) and isinstance(size, int):
        return max(0, min(bound, size))
    return bound


def _select(call: AtenCall) -> Value | None:
    x = call.tensor("self")
    dim = call["dim"] % x.tensor.rank
    index = call.dim("index")
    if isinstance(index, int) and index < 0:
        index = plus(x.shape[dim], index)
    return call.emit("select", x, dim=dim, index=index)


def _split(call: AtenCall) -> Sequence[Value] | None:
    """Every way to cut along a dim: the trace knows the sizes of the pieces."""
    x = call.tensor("self")
    dim = call["dim"] % x.tensor.rank
    sizes = [piece.shape[dim] for piece in call.result_types]
    return [x] if len(sizes) == 1 else call.emit_all("split", x, sizes=sizes, dim=dim)


def _unbind(call: AtenCall) -> Sequence[Value] | None:
    x = call.tensor("self")
    dim = call["dim"] % x.tensor.rank
    return [call.emit("select", x, dim=dim, index=index) for index in range(len(call.result_types))]


def _concat(call: AtenCall) -> Value | None:
    xs = [call.value_of(node) for node in call["tensors"]]
    dim = call["dim"] % call.result_type.rank
    return xs[0] if len(xs) == 1 else call.emit("concat", *xs, dim=dim)


def _stack(call: AtenCall) -> Value | None:
    dim = call["dim"] % call.result_type.rank
    xs = [call.value_of(node) for node in call["tensors"]]
    return call.emit("concat", *(call.emit("unsqueeze", x, dim=dim) for x in xs), dim=dim)


_Rule = Callable[[AtenCall], Any]

SHAPE_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        [
            "aten.view.default",
            "aten._unsafe_view.default",
            "aten.reshape.default",
            "aten.flatten.using_ints",
            "aten.unflatten.int",
        ],
        _reshape,
    ),
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.transpose.int": _transpose,
    "aten.t.default": _turn,
    "aten.permute.default": _permute,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _concat,
    "aten.stack.default": _stack,
}
