"""What the program needs to know of an op: its kernel, and what it wants from the memory plan.

An op with a file under ``templates/<target>/`` is a kernel, by the rules of ``cpu_rules.py`` and
``triton_rules.py``; the rest are single PyTorch calls (``expressions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.ir.errors import OctavoError
from octavo.ir.graph import Node
from octavo.ir.ops.aten import _overload
from octavo.ir.types import KVType, TensorType

VIEWS = frozenset("reshape expand transpose permute unsqueeze squeeze slice select split".split())
UNARY = frozenset("neg exp sqrt rsqrt cos sin tanh sigmoid relu silu gelu".split())
BINARY = frozenset(("add", "sub", "mul", "div", "pow"))
PLAN = "plan."  # prefix of the pseudo ops that run a kernel's `plan` once a step
COPY = "copy_reshape"  # pseudo op: a reshape that its operand's strides do not allow as a view


@dataclass(frozen=True)
class Kernel:
    """A template and the constants that specialise it.

    ``label`` tells kernels of one template apart in file names. ``plan_operands`` are replaced by
    the result of the kernel's ``plan``, which runs once a step, and ``plan_constants`` says which
    plans are the same. ``prepared`` operands go through the kernel's ``prepare`` once, at load.
    ``layouts`` are pairs of a quantised operand and the layout of its parts (quant_layouts.py).
    ``keywords`` are what the kernel wants of the program: attributes of its Buffers, by name.
    """

    op: str
    constants: tuple[tuple[str, Any], ...]
    label: tuple[Any, ...]
    template: str | None = None  # the file's name, if it is not the op's
    keywords: tuple[str, ...] = ()
    plan_operands: tuple[int, ...] = ()
    plan_constants: tuple[Any, ...] = ()
    prepared: tuple[int, ...] = ()
    layouts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Rule:
    """How a node is run: ``outs[i]`` is the keyword of result ``i``'s buffer, None if it has none.

    ``alias``: the results are views of the operands. ``in_place``: pairs of a result and an operand
    whose buffer it may overwrite, when they are of one type and the operand is read no more.
    ``scratch``: keywords and types of buffers that the kernel uses while it runs.
    """

    outs: tuple[str | None, ...]
    kernel: Kernel | None = None
    alias: bool = False
    in_place: tuple[tuple[int, int], ...] = ()
    scratch: tuple[tuple[str, TensorType], ...] = ()


def kv_code_constants(node: Node, kv: KVType, scales_at: int) -> tuple[tuple[str, Any], ...]:
    """What a kernel has to know of a cache of codes, whose scales of heads are two operands.

    Behind them is the offset of keys, if the kernel writes any.
    Nothing where the cache holds what it is given: such kernels are told of no codes at all.
    """
    if kv.scheme is None:
        return ()
    given = [value is not None for value in node.inputs[scales_at : scales_at + 3]]
    return (
        ("kv_scales", kv.scales),
        ("kv_largest", kv.scheme.largest),
        ("has_head_scales", any(given[:2])),
        ("has_key_offset", any(given[2:])),
    )


# An op's rule, or None where the op's kernel does not cover this node.
KernelRules = Mapping[str, Callable[[Node], Rule | None]]


def rule_for(node: Node, kernels: KernelRules) -> Rule:
    """The rule of a node, given a target's own. Raises OctavoError for an op without any."""
    op = node.op
    if op in kernels and (rule := kernels[op](node)) is not None:
        return rule
    if op in VIEWS:
        return Rule((None,) * len(node.outputs), alias=True)
    if op in UNARY or op in BINARY:
        given = (index for index, value in enumerate(node.inputs) if value is not None)
        return Rule(("out",), in_place=tuple((0, index) for index in given))
    if op in ("cast", "matmul", "concat", "gather_rows", "gather_columns", "embedding", COPY):
        return Rule(("out",))
    if op.startswith(PLAN):
        return Rule((None,))
    if op.startswith("aten."):
        returns = _overload(op)._schema.returns
        return Rule((None,) * len(node.outputs), alias=any(r.alias_info for r in returns))
    raise OctavoError(f"{node}: there is no kernel for {op!r}; this is a gap in Octavo, report it")


def is_fallback(node: Node) -> bool:
    """True for an op that has no meaning of its own here and is left to PyTorch."""
    return node.op.startswith("aten.")
