"""The op registry: each op is one decorated function, and everything else reads its signature.

    @op
    def softcap(x: Tensor, *, cap: float) -> Tensor:
        \"\"\"Squash to ``(-cap, cap)``: ``cap * tanh(x / cap)``.\"\"\"
        return torch.tanh(x / cap) * cap

Positional parameters are operands (a default of None makes one optional, ``*xs`` takes any number),
keyword-only ones are attributes, the docstring is the documentation, the body is the reference
evaluation. Result types come from a rule given with ``@softcap.infer``, or, where there is none,
from running the body on the meta device at a few sizes of the symbols.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.types import DTYPE_NAMES, Dim, KVType, QuantType, SymDim, TensorType, Type

Infer = Callable[..., Type | tuple[Type, ...]]

# Sizes for probing: large, coprime, and unlike any model constant, so that no dimension is one of
# them by accident; each symbol is then moved alone.
_PROBE = {"T": 1009, "S": 503, "B": 251, "R": 127}
_STEP = 2


@dataclass
class OpDef:
    """The declaration of one op."""

    name: str
    evaluate: Callable[..., Any]
    operands: tuple[str, ...]
    required: int
    variadic: bool
    attributes: dict[str, inspect.Parameter]
    infer_rule: Infer | None = None

    @property
    def doc(self) -> str:
        """The first line of the documentation."""
        return (self.evaluate.__doc__ or "").strip().splitlines()[0]

    @property
    def takes_quantized(self) -> bool:
        """Whether some operand may be a quantised matrix."""
        annotations = inspect.get_annotations(self.evaluate)
        return any("QuantTensor" in str(annotations[name]) for name in self.operands)

    def infer(self, rule: Infer) -> Infer:
        """Decorator: the rule for the result types; it sees types where the op sees tensors."""
        self.infer_rule = rule
        return rule

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check attribute names, fill defaults in, freeze lists. Raises VerifyError."""
        unknown = [name for name in given if name not in self.attributes]
        if unknown:
            raise VerifyError(
                f"{self.name} has no attribute {unknown[0]!r}; it has {list(self.attributes)}"
            )
        attrs = {}
        for name, parameter in self.attributes.items():
            if name not in given and parameter.default is inspect.Parameter.empty:
                raise VerifyError(f"{self.name} needs the attribute {name!r}")
            attrs[name] = freeze(given.get(name, parameter.default))
        return attrs

    def check_operands(self, operands: Sequence[object]) -> None:
        """Raise VerifyError unless the operands fit the declaration in number and presence."""
        count = len(operands)
        if count < self.required or (count > len(self.operands) and not self.variadic):
            expected = f"{self.required} to {len(self.operands)}" + (" or more" * self.variadic)
            raise VerifyError(f"{self.name} takes {expected} operands, got {count}")
        for index in range(self.required):
            if operands[index] is None:
                raise VerifyError(f"{self.name}: operand {self.operands[index]!r} is missing")


# What PyTorch raises for operands and attributes that do not fit.
EVALUATION_ERRORS = (
    RuntimeError,
    IndexError,
    KeyError,
    AttributeError,
    ValueError,
    TypeError,
    NotImplementedError,
)


def reason(error: Exception) -> str:
    """One line that says why an evaluation failed."""
    if isinstance(error, KeyError):
        return f"unknown {error}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


_OPS: dict[str, OpDef] = {}


def op(function: Callable[..., Any]) -> OpDef:
    """Register a function as an op of its name (a trailing underscore is dropped)."""
    name = function.__name__.rstrip("_")
    assert name not in _OPS, f"op {name} is declared twice"
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    _OPS[name] = OpDef(
        name=name,
        evaluate=function,
        operands=tuple(p.name for p in [*positional, *variadic]),
        required=sum(p.default is p.empty for p in positional),
        variadic=bool(variadic),
        attributes={p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY},
    )
    return _OPS[name]


def registered_ops() -> dict[str, OpDef]:
    """All ops with a meaning of their own, by name."""
    return dict(_OPS)


def op_def(name: str) -> OpDef:
    """Look an op up; ``aten.*`` is always there. Raises VerifyError for an unknown name."""
    if name.startswith("aten."):
        from octavo.ir.ops.aten import aten_op_def

        return aten_op_def(name)
    if name not in _OPS:
        raise VerifyError(f"unknown op {name!r}")
    return _OPS[name]


def freeze(value: Any) -> Any:
    """Lists become tuples, all the way down: attributes are compared and hashed."""
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def resolve(value: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with its symbolic dims replaced by numbers."""
    if isinstance(value, SymDim):
        return value.at(sizes)
    if isinstance(value, tuple):
        return tuple(resolve(item, sizes) for item in value)
    return value


def infer_types(
    name: str, operands: Sequence[Type | None], attrs: Mapping[str, Any]
) -> tuple[Type, ...]:
    """The result types of an op. Raises VerifyError naming the op and what does not fit.

    Remembered by op, operand types and attributes: the layers of a model ask the same questions.
    """
    kinds = tuple(map(_kind, attrs.values()))
    return _infer_cached(name, tuple(operands), tuple(attrs.items()), kinds)


def _kind(value: Any) -> object:
    """What tells 1, 1.0 and True apart, which are one key in Python but give other dtypes."""
    return tuple(map(_kind, value)) if isinstance(value, tuple) else type(value)


@lru_cache(maxsize=65536)
def _infer_cached(
    name: str,
    operands: tuple[Type | None, ...],
    attrs: tuple[tuple[str, Any], ...],
    kinds: tuple[object, ...],
) -> tuple[Type, ...]:
    definition = op_def(name)
    definition.check_operands(operands)
    matrix = next((operand for operand in operands if isinstance(operand, QuantType)), None)
    if matrix is not None and not definition.takes_quantized:
        raise VerifyError(f"{name} does not take the quantised {matrix}; dequantize it first")
    try:
        if definition.infer_rule is None:
            return _probe(definition, operands, dict(attrs))
        result = definition.infer_rule(*operands, **dict(attrs))
    except EVALUATION_ERRORS as error:
        shown = ", ".join(map(str, operands))
        raise VerifyError(f"{name}({shown}): {reason(error)}") from None
    return result if isinstance(result, tuple) else (result,)


def _symbols(value: Any) -> set[str]:
    if isinstance(value, SymDim):
        return {value.symbol}
    if isinstance(value, TensorType):
        return _symbols(value.shape)
    if isinstance(value, tuple):
        return set().union(*map(_symbols, value))
    return set()


def _probe(
    definition: OpDef, operands: tuple[Type | None, ...], attrs: dict[str, Any]
) -> tuple[Type, ...]:
    symbols = sorted(_symbols(operands) | _symbols(tuple(attrs.values())))
    base = _run_on_meta(definition, operands, attrs, _PROBE)
    shapes: list[list[Dim]] = [list(result.shape) for result in base]
    for symbol in symbols:
        moved = {**_PROBE, symbol: _PROBE[symbol] + _STEP}
        for index, result in enumerate(_run_on_meta(definition, operands, attrs, moved)):
            for axis, size in enumerate(result.shape):
                grown = size - base[index].shape[axis]
                if grown:
                    scale, rest = divmod(grown, _STEP)
                    if rest or isinstance(shapes[index][axis], SymDim):
                        raise VerifyError(
                            f"{definition.name}: dim {axis} is not affine in a symbol"
                        )
                    offset = base[index].shape[axis] - scale * _PROBE[symbol]
                    shapes[index][axis] = SymDim(symbol, scale, offset)
    return tuple(
        TensorType(DTYPE_NAMES[result.dtype], tuple(shape))
        for result, shape in zip(base, shapes, strict=True)
    )


def _run_on_meta(
    definition: OpDef,
    operands: tuple[Type | None, ...],
    attrs: dict[str, Any],
    sizes: Mapping[str, int],
) -> tuple[Tensor, ...]:
    tensors = []
    for operand in operands:
        assert not isinstance(operand, QuantType), "ops that take quantised matrices have rules"
        if isinstance(operand, KVType):
            raise VerifyError(f"{definition.name} does not take a KV state")
        tensors.append(
            torch.empty(operand.sizes(sizes), dtype=operand.torch_dtype, device="meta")
            if operand is not None
            else None
        )
    resolved = {name: resolve(value, sizes) for name, value in attrs.items()}
    result = definition.evaluate(*tensors, **resolved)
    return tuple(result) if isinstance(result, tuple | list) else (result,)
