"""``aten.<name>.<overload>``: the ops that PyTorch runs for us because we have no meaning for them.

Operands are the call's tensors in the order of the schema. Other arguments are attributes under
the schema's names. A list of tensors is an attribute that refers to operands:
``tensors=[$0, $1]``; plain tensor arguments take the operands that no list refers to, in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.ops.registry import OpDef, freeze
from octavo.ir.types import DTYPES


@dataclass(frozen=True)
class OperandRef:
    """Stands for operand ``index`` inside an attribute of an ``aten`` op; printed ``$index``."""

    index: int

    def __str__(self) -> str:
        return f"${self.index}"


class _AtenOp(OpDef):
    """An op that takes whatever its PyTorch schema takes."""

    def complete(self, given: Any) -> dict[str, Any]:
        known = {argument.name for argument in _overload(self.name)._schema.arguments}
        for name in given:
            if name not in known:
                raise VerifyError(f"{self.name} has no argument {name!r}; it has {sorted(known)}")
        return {name: freeze(value) for name, value in given.items()}

    def check_operands(self, operands: Any) -> None:
        return None


@cache
def _overload(name: str) -> torch._ops.OpOverload[..., Any]:
    parts = name.split(".")
    packet = getattr(torch.ops.aten, parts[1], None)
    overload = getattr(packet, parts[2] if len(parts) > 2 else "default", None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise VerifyError(f"PyTorch {torch.__version__} has no op {name!r}")
    return overload


def _references(value: Any) -> Iterator[int]:
    if isinstance(value, OperandRef):
        yield value.index
    elif isinstance(value, tuple):
        for item in value:
            yield from _references(item)


def _substitute(value: Any, operands: tuple[Tensor | None, ...]) -> Any:
    if isinstance(value, OperandRef):
        return operands[value.index]
    if isinstance(value, tuple):
        return [_substitute(item, operands) for item in value]
    return value


def aten_arguments(
    name: str, operands: tuple[Any, ...], attrs: dict[str, Any]
) -> tuple[torch._ops.OpOverload[..., Any], dict[str, Any]]:
    """The PyTorch overload and the keyword arguments that a node means."""
    overload = _overload(name)
    taken = set(_references(tuple(attrs.values())))
    free = iter([value for index, value in enumerate(operands) if index not in taken])
    arguments: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if argument.name in attrs:
            value = _substitute(attrs[argument.name], operands)
            is_dtype = argument.name == "dtype" and isinstance(value, str)
            arguments[argument.name] = DTYPES[value] if is_dtype else value
        elif kind in ("Tensor", "Optional[Tensor]"):
            value = next(free, None)
            if value is not None:
                arguments[argument.name] = value
    return overload, arguments


@cache
def aten_op_def(name: str) -> OpDef:
    """The declaration of one ``aten`` op. Raises VerifyError when PyTorch has no such op."""
    overload = _overload(name)

    def evaluate(*operands: Tensor | None, **attrs: Any) -> Any:
        call, arguments = aten_arguments(name, operands, attrs)
        if "device" in {a.name for a in call._schema.arguments} and not operands:
            arguments.setdefault("device", "cpu")
        positional = [a.name for a in call._schema.arguments if not a.kwarg_only]
        # Arguments go by position as far as they are given: some schemas call theirs `self`.
        given = []
        while positional and positional[0] in arguments:
            given.append(arguments.pop(positional.pop(0)))
        return call(*given, **arguments)

    evaluate.__doc__ = f"PyTorch's {overload._schema}."
    parameters = inspect.signature(evaluate).parameters
    return _AtenOp(
        name=name,
        evaluate=evaluate,
        operands=("operands",),
        required=0,
        variadic=True,
        attributes={p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY},
    )
