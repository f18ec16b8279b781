"""What passes need to know of an op's arithmetic to move it about."""

from __future__ import annotations

import torch

from octavo.ir.graph import Node
from octavo.ir.ops import elementwise, op_def
from octavo.ir.ops.aten import aten_arguments
from octavo.ir.types import KVType

# Only rearrange; a unit dim more or less, or another order of the dims.
PERMUTING = ("transpose", "permute", "unsqueeze", "squeeze")
VIEWS = (*PERMUTING, "reshape", "expand")


def is_elementwise(op: str) -> bool:
    """True when each element of the result depends on just one of each operand, broadcast."""
    if op.startswith("aten."):
        return torch.Tag.pointwise in aten_arguments(op, (), {})[0].tags
    return op_def(op).evaluate.__module__ == elementwise.__name__


def is_pure(node: Node) -> bool:
    """True when two such nodes with equal operands give equal results, and nothing else."""
    if any(isinstance(value.type, KVType) for value in node.outputs):
        return False
    if not node.op.startswith("aten."):
        return True
    return torch.Tag.nondeterministic_seeded not in aten_arguments(node.op, (), {})[0].tags
