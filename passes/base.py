"""What a pass is: a registered function from a graph to a count, with a report beside it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.kv_scheme import KVScheme
from octavo.passes.layers import layer_of
from octavo.passes.quant_recipe import AS_IS, Quantization

PassFunction = Callable[[Graph, "Report"], int]

_PASSES: dict[str, PassFunction] = {}


@dataclass(frozen=True)
class PassContext:
    """What a pass may know besides the graph.

    ``max_position`` is the number of positions that the model can take: positions are below it.
    ``quantization`` says which linears are to be quantised. ``kv_scheme`` is how the KV cache is to
    hold keys and values, None for as they are; ``has_kv_scales``: its scales of heads are weights,
    where they are ones otherwise; ``has_kv_offsets``: so are offsets that are taken off keys.
    """

    max_position: int
    quantization: Quantization = AS_IS
    kv_scheme: KVScheme | None = None
    has_kv_scales: bool = False
    has_kv_offsets: bool = False


@dataclass(frozen=True)
class Missed:
    """A candidate that a pass left as it was: the value's name, and why."""

    where: str
    reason: str


@dataclass
class Report:
    """What a pass tells besides its count; handed to the pass with its context."""

    context: PassContext
    misses: list[Missed] = field(default_factory=list)

    def missed(self, where: Node | Value, reason: str) -> bool:
        """Note that a candidate was passed over. Returns False: ``return report.missed(...)``."""
        value = where.outputs[0] if isinstance(where, Node) else where
        miss = Missed(str(value), reason)
        # A pass that works to a fixpoint asks about the same node again.
        if miss not in self.misses:
            self.misses.append(miss)
        return False


def register_pass(name: str) -> Callable[[PassFunction], PassFunction]:
    """Register a pass under its name; ``fuse-qkv`` has to live in passes/fuse_qkv.py."""

    def register(function: PassFunction) -> PassFunction:
        expected = module_name(name)
        assert function.__module__ == expected, f"pass {name} belongs into {expected}"
        assert name not in _PASSES, f"pass {name} is declared twice"
        _PASSES[name] = function
        return function

    return register


def module_name(name: str) -> str:
    """The module in which the pass of this name lives."""
    return f"octavo.passes.{name.replace('-', '_')}"


def find_pass(name: str) -> PassFunction:
    """The pass of a name, imported from where the name says. Raises ModuleNotFoundError."""
    importlib.import_module(module_name(name))
    return _PASSES[name]


def count_layers(graph: Graph) -> int:
    """The number of layers that the names of a graph speak of."""
    names = (value.name for node in graph.all_nodes() for value in node.outputs)
    layers = [layer for name in names if (layer := layer_of(name)) is not None]
    return max(layers, default=-1) + 1


def summarize(misses: Sequence[Missed], num_layers: int) -> str:
    """One line: ``31 of 32 layers; layer 5: bias on k_proj``; empty when nothing was missed.

    It opens with the layers that nothing was missed in. Equal reasons are told once, with the
    layers they hold for; what lies outside the layers goes by its name.
    """
    if not misses:
        return ""
    places: dict[str, dict[int | str, None]] = {}
    for miss in misses:
        layer = layer_of(miss.where)
        places.setdefault(miss.reason, {})[miss.where if layer is None else layer] = None
    hit = {place for found in places.values() for place in found if isinstance(place, int)}
    opening = [f"{num_layers - len(hit)} of {num_layers} layers"] if hit else []
    return "; ".join(
        [*opening, *(f"{_places(found, num_layers)}: {why}" for why, found in places.items())]
    )


def _places(found: Iterable[int | str], num_layers: int) -> str:
    layers = sorted(place for place in found if isinstance(place, int))
    others = [place for place in found if isinstance(place, str)]
    parts = others if len(others) <= 4 else [*others[:3], f"{len(others) - 3} more"]
    if len(layers) == 1:
        return ", ".join([f"layer {layers[0]}", *parts])
    if len(layers) == num_layers and layers:
        return ", ".join([f"all {num_layers} layers", *parts])
    if layers:
        few = f"layers {', '.join(map(str, layers))}"
        return ", ".join([few if len(layers) <= 8 else f"{len(layers)} layers", *parts])
    return ", ".join(parts)
