"""ATen calls that PyTorch keeps running: ``aten.<name>.<overload>``, every argument written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from octavo.frontend.aten_call import AtenCall
from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.errors import VerifyError
from octavo.ir.graph import Value
from octavo.ir.ops.aten import OperandRef
from octavo.ir.types import DTYPE_NAMES

# Where tensors live and how they are laid out is the target's business.
_PLACEMENT = ("device", "pin_memory", "layout", "memory_format", "non_blocking", "generator")


def import_generic(call: AtenCall) -> Value | Sequence[Value]:
    """Emit the call under its own name; see ``ir/ops/aten.py`` for how arguments are laid out.

    Raises RefusedArchitecture for an op outside ATen and for arguments that the IR cannot say.
    """
    target = call.node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target.namespace != "aten":
        raise RefusedArchitecture(f"unknown operation {target}")
    operands: list[Value | None] = []
    attrs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        value = call[argument.name]
        if argument.name in _PLACEMENT:
            continue
        if str(argument.type) in ("Tensor", "Optional[Tensor]") and _is_tensor(value):
            operands.append(call.value_of(value))
        elif str(argument.type) == "Optional[Tensor]" and value is None:
            operands.append(None)
        elif not argument.has_default_value() or value != argument.default_value:
            attrs[argument.name] = _attribute(call, value, operands)
    while operands and operands[-1] is None:
        operands.pop()
    try:
        results = call.emit_all(str(target), *operands, **attrs)
    except VerifyError as error:
        raise RefusedArchitecture(f"{error}") from error
    return results if isinstance(call.node.meta["val"], list | tuple) else results[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta["val"], Tensor)


def _attribute(call: AtenCall, value: Any, operands: list[Value | None]) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_attribute(call, item, operands) for item in value)
    if _is_tensor(value):
        operands.append(call.value_of(value))
        return OperandRef(len(operands) - 1)
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    if isinstance(value, torch.SymInt | fx.Node):
        return call.sizes.dim(value)
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise RefusedArchitecture(f"{call.node.target} takes {value!r}")
