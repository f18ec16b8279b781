"""Matching of tensors with declared types: sizes of the symbols, and checks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Value
from octavo.ir.ops.paged import KVState
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import DTYPE_NAMES, KVType, QuantType, SymDim, TensorType, dim_at


def bind_inputs(
    graph: Graph, inputs: Mapping[str, Tensor | QuantTensor | KVState]
) -> dict[str, int]:
    """The sizes of the symbols, read off the inputs; all inputs are checked against their types.

    Raises VerifyError that names the input, what was expected and what came.
    """
    names = [value.name for value in graph.inputs]
    missing = [name for name in names if name not in inputs]
    unknown = [name for name in inputs if name not in names]
    if missing or unknown:
        raise VerifyError(f"@{graph.name} takes the inputs {names}, got {list(inputs)}")
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        given = inputs[value.name]
        if isinstance(value.type, TensorType) and isinstance(given, Tensor):
            _bind_tensor(value, value.type, given, sizes)
    for value in graph.inputs:
        check_result(value, inputs[value.name], sizes)
    return sizes


def check_result(
    value: Value, given: Tensor | QuantTensor | KVState, sizes: Mapping[str, int]
) -> None:
    """Raise VerifyError unless a tensor, quantised matrix or state is of its value's type."""
    if isinstance(value.type, KVType):
        fits = isinstance(given, KVState) and _fits_kv(value.type, given)
    elif isinstance(value.type, QuantType):
        fits = isinstance(given, QuantTensor) and _fits_quant(value.type, given)
    else:
        fits = (
            isinstance(given, Tensor)
            and given.dtype == value.type.torch_dtype
            and tuple(given.shape) == _sizes(value, value.type, sizes)
        )
    if not fits:
        at = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
        made = f" = {value.producer.op}(...)" if value.producer else ""
        raise VerifyError(
            f"{value}{made}: expected {value.type} at {at or 'no symbols'}, got {_shown(given)}"
        )


def _bind_tensor(value: Value, declared: TensorType, given: Tensor, sizes: dict[str, int]) -> None:
    if given.dim() != declared.rank:
        raise VerifyError(f"{value}: expected {declared}, got {_shown(given)}")
    for axis, (dim, size) in enumerate(zip(declared.shape, given.shape, strict=True)):
        if not isinstance(dim, SymDim):
            continue
        solved, rest = divmod(size - dim.offset, dim.scale)
        if rest or solved < 0:
            raise VerifyError(f"{value}: dim {axis} is {size}, which is no value of {dim}")
        if sizes.setdefault(dim.symbol, solved) != solved:
            raise VerifyError(
                f"{value}: dim {axis} is {size}, so {dim.symbol} would be {solved}; an earlier "
                f"input has {dim.symbol}={sizes[dim.symbol]}"
            )


def _sizes(value: Value, declared: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return tuple(dim_at(dim, sizes) for dim in declared.shape)
    except KeyError as error:
        raise VerifyError(f"{value}: no input has the symbol {error} of {declared}") from None


def _fits_kv(declared: KVType, given: KVState) -> bool:
    if len(given.keys) != len(declared.slots) or len(given.values) != len(declared.slots):
        return False
    sides = (given.key_scales, given.value_scales)
    if not all(_fits_scales(declared, given.keys, scales) for scales in sides):
        return False
    return all(
        key.shape[2:] == (slot.num_kv_heads, slot.head_dim)
        and value.shape[2:] == (slot.num_kv_heads, slot.v_head_dim)
        and key.shape[:2] == value.shape[:2]
        and DTYPE_NAMES.get(key.dtype) == DTYPE_NAMES.get(value.dtype) == declared.dtype
        for slot, key, value in zip(declared.slots, given.keys, given.values, strict=True)
    )


def _fits_scales(declared: KVType, caches: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> bool:
    """Scales of tokens are of the caches' blocks, heads and places; other states have none."""
    if declared.scales != "token":
        return not scales
    return len(scales) == len(caches) and all(
        scale.shape == (cache.shape[0], cache.shape[2], cache.shape[1])
        and DTYPE_NAMES.get(scale.dtype) == "f32"
        for cache, scale in zip(caches, scales, strict=True)
    )


def _fits_quant(declared: QuantType, given: QuantTensor) -> bool:
    given.check()
    return (declared.scheme, declared.shape) == (given.scheme, given.shape)


def _shown(given: object) -> str:
    if isinstance(given, Tensor):
        dtype = DTYPE_NAMES.get(given.dtype, str(given.dtype))
        return f"{dtype}[{', '.join(map(str, given.shape))}]"
    if isinstance(given, QuantTensor):
        return f"{given.scheme}[{', '.join(map(str, given.shape))}]"
    if isinstance(given, KVState):
        slots = [f"{_shown(k)} {_shown(v)}" for k, v in zip(given.keys, given.values, strict=True)]
        return f"a KV state of {len(slots)} slots: {'; '.join(slots[:2])}"
    return type(given).__name__
