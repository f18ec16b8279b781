"""Which linears are quantised, and how: recipes, and the modules that they speak of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.quant_scheme import QuantScheme
from octavo.passes.fused_linear import LINEARS
from octavo.passes.layers import layer_of

HEAD = "lm_head"
# What routes tokens to experts is small, and a wrong choice costs more than a coarse product.
_ROUTERS = ("router", "gate", "shared_expert_gate")
_BETWEEN_HEAD_AND_LOGITS = ("cast", "softcap", "mul", "div", "slice", "reshape", "gather_rows")


@dataclass(frozen=True)
class Recipe:
    """Patterns over module paths, each with a scheme, or None to leave a module as it is.

    The first pattern that matches decides; what none matches is left. ``*`` stands for any text.
    Besides its path a module answers to ``first.<rest>`` or ``last.<rest>`` in the first and the
    last layer, and the LM head to ``lm_head``. Patterns that end in ``*`` pass over the head and
    over routers: these are quantised only where they are named.

    ``is_for_model``: written for the model at hand, so that a pattern without a match is a mistake.
    """

    name: str
    rules: tuple[tuple[str, QuantScheme | None], ...]
    is_for_model: bool = False

    def scheme_of(self, module: Module) -> QuantScheme | None:
        """How a module's matrix is quantised, None for not at all."""
        return next((scheme for pattern, scheme in self.rules if module.answers(pattern)), None)

    def unmatched(self, modules: Sequence[Module]) -> list[str]:
        """The patterns that no module answers to."""
        patterns = [pattern for pattern, _ in self.rules]
        return [p for p in patterns if not any(module.answers(p) for module in modules)]


@dataclass(frozen=True)
class Module:
    """A linear of the model, by all its paths, the one in its checkpoint first."""

    paths: tuple[str, ...]
    is_head: bool = False

    @property
    def is_special(self) -> bool:
        """True for the LM head and for routers."""
        return self.is_head or any(
            path.endswith(f".{name}") for path in self.paths for name in _ROUTERS
        )

    def answers(self, pattern: str) -> bool:
        """Whether a pattern of a recipe is about it."""
        if self.is_special and pattern.endswith("*"):
            return False
        return any(fnmatchcase(path, pattern) for path in self.paths)


def _every_scheme(scheme: QuantScheme) -> str | None:
    return None


def _no_scheme(scheme: QuantScheme) -> bool:
    return False


@dataclass(frozen=True)
class Quantization:
    """What quantize-linears goes by.

    ``is_calibrated``: the codes come from elsewhere, by the name of the weight. ``why_no_kernel``
    says why the target cannot multiply by matrices of a scheme, None when it can; ``can_embed``
    whether it looks rows up in them. ``scaled`` are the names of the inputs of linears that a
    calibration scales.
    """

    recipe: Recipe | None = None
    is_calibrated: bool = False
    why_no_kernel: Callable[[QuantScheme], str | None] = field(default=_every_scheme)
    can_embed: Callable[[QuantScheme], bool] = field(default=_no_scheme)
    scaled: frozenset[str] = frozenset()


AS_IS = Quantization()


class Modules:
    """The modules of a graph's linears."""

    def __init__(self, graph: Graph) -> None:
        self._head = _head_of(graph)
        layers = [layer for key in _all_keys(graph) if (layer := layer_of(key)) is not None]
        self._last = max(layers, default=0)

    def of(self, linear: Node) -> list[Module]:
        """Those whose matrices make up the weight of a linear: several once they are merged."""
        is_head = linear is self._head
        paths = [key.removesuffix(".weight") for key in matrix_keys(linear.operand(1))]
        return [self._module(path, is_head) for path in paths or [linear.outputs[0].name]]

    def _module(self, path: str, is_head: bool) -> Module:
        layer = layer_of(path)
        aliases = [HEAD] if is_head else []
        rest = path.partition(f".{layer}.")[2]
        aliases += [f"first.{rest}"] if layer == 0 else []
        aliases += [f"last.{rest}"] if layer is not None and layer == self._last else []
        return Module(tuple(dict.fromkeys([path, *aliases])), is_head)


def dequantized_parts(weight: Value) -> list[Value]:
    """The quantised matrices, under one another, whose dequantisation a weight is; else none."""
    node = weight.producer
    if node is None:
        return []
    if node.op == "dequantize":
        return [node.operand(0)]
    if node.op != "concat" or node.attrs["dim"] not in (0, -2):
        return []
    found = [dequantized_parts(part) for part in node.operands]
    return [part for parts in found for part in parts] if all(found) else []


def matrix_keys(weight: Value) -> list[str]:
    """The keys of the matrices of the checkpoint that a weight is made of, in order."""
    found: dict[str, None] = {}
    pending, seen = [weight], {weight}
    while pending:
        node = pending.pop(0).producer
        if node is None:
            continue
        if "key" in node.attrs and len(node.output.shape) >= 2:
            found[node.attrs["key"]] = None
        fresh = [value for value in node.operands if value not in seen]
        seen.update(fresh)
        pending = fresh + pending
    return list(found)


def _all_keys(graph: Graph) -> Iterator[str]:
    for node in graph.weight_nodes:
        if "key" in node.attrs:
            yield node.attrs["key"]


def _head_of(graph: Graph) -> Node | None:
    """The linear that makes the logits."""
    for value in graph.outputs:
        node = value.producer
        while node is not None and node.op in _BETWEEN_HEAD_AND_LOGITS:
            node = node.operand(0).producer
        if node is not None and node.op in LINEARS:
            return node
    return None
