"""``--quant auto``: the recipe that keeps most of a model within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.calibrate.budget import Candidate, choose_under_budget
from octavo.calibrate.quantize_streamed import first_linears, schemes_of
from octavo.calibrate.sensitivity import Sensitivity, measure_sensitivity
from octavo.ir.errors import OctavoError, VerifyError
from octavo.ir.graph import Graph, Node
from octavo.ir.interpret import WeightCache, WeightSource
from octavo.ir.quant_scheme import QuantScheme
from octavo.passes.quant_recipe import Modules, Recipe
from octavo.quantize import NO_SCHEME

_EVERY = QuantScheme.parse("int8<1x*, f32>")  # fits any matrix


@dataclass(frozen=True)
class Choice:
    """A matrix by the modules it holds, the scheme that it got, its bytes and relative error."""

    modules: tuple[str, ...]
    scheme: str
    num_bytes: int
    error: float


@dataclass(frozen=True)
class AutoRecipe:
    """The choices, in the order of the step, and the bytes of all weights with them."""

    choices: tuple[Choice, ...]
    total_bytes: int

    @property
    def recipe(self) -> Recipe:
        """As quantize-linears takes it."""
        rules = [
            (module, None if choice.scheme == NO_SCHEME else QuantScheme.parse(choice.scheme))
            for choice in self.choices
            for module in choice.modules
        ]
        return Recipe("auto", tuple(rules))

    def to_yaml(self) -> str:
        """As ``--quant FILE.yaml`` takes it, with what was measured beside each choice."""
        lines = [
            f"# Chosen by --quant auto: {_gb(self.total_bytes)} GB of weights. Edit it, and",
            "# give it to --quant. After each scheme: bytes, relative error of the product, of",
            "# all siblings that are merged (Q, K and V; gate and up) together.",
        ]
        for choice in self.choices:
            lines += [
                f"{module}: '{choice.scheme}'  # {choice.num_bytes:,} {choice.error:.2e}"
                for module in choice.modules
            ]
        return "\n".join(lines) + "\n"


def choose_recipe(
    graph: Graph,
    weights: WeightSource | WeightCache,
    sequences: Sequence[Sequence[int]],
    schemes: Sequence[QuantScheme],
    budget_bytes: int,
) -> AutoRecipe:
    """The schemes, of those given and none at all, that lose least within ``budget_bytes``.

    The budget is that of all weights, quantised or not. ``graph`` is as fold-input-scales finds
    it. Raises OctavoError for a budget that cannot be met, saying the least.
    """
    room = require_room(graph, schemes, budget_bytes)
    measured = list(measure_sensitivity(graph, weights, sequences, room.schemes))
    chosen = choose_under_budget(
        [_candidates(each) for each in measured], budget_bytes - room.fixed_bytes
    )
    modules = Modules(graph)
    choices = tuple(
        Choice(
            tuple(module.paths[0] for module in modules.of(room.linears[each.name])),
            pick.scheme,
            pick.num_bytes,
            pick.cost,
        )
        for each, pick in zip(measured, chosen, strict=True)
    )
    return AutoRecipe(choices, room.fixed_bytes + sum(choice.num_bytes for choice in choices))


@dataclass(frozen=True)
class _Room:
    """What a budget is spent on: matrices by name, the first linear of each and the schemes that
    fit it; and the bytes of all other weights."""

    linears: dict[str, Node]
    schemes: dict[str, list[QuantScheme]]
    fixed_bytes: int

    @property
    def least_bytes(self) -> int:
        """Of all weights, each matrix in the smallest of its schemes."""
        return self.fixed_bytes + sum(map(self._least_of, self.linears))

    def _least_of(self, name: str) -> int:
        weight = self.linears[name].operand(1)
        rows, columns = weight.shape
        sizes = [scheme.num_bytes(rows, columns) for scheme in self.schemes[name]]
        return min([weight.tensor.num_bytes({}), *sizes])


def require_room(graph: Graph, schemes: Sequence[QuantScheme], budget_bytes: int) -> _Room:
    """What the budget of ``choose_recipe`` is spent on; measures nothing. Raises OctavoError for a
    budget that cannot be met, saying the least."""
    names = schemes_of(graph, Recipe("auto", (("*", _EVERY),)))
    linears = {weight.name: linear for linear, weight in first_linears(graph, names)}
    fitting = {
        name: [scheme for scheme in schemes if _fits(scheme, linears[name].operand(1).shape)]
        for name in names
    }
    others = [value for value in graph.used_weights() if value.name not in names]
    room = _Room(linears, fitting, sum(value.tensor.num_bytes({}) for value in others))
    if room.least_bytes > budget_bytes:
        raise OctavoError(
            f"--budget-gb {budget_bytes / 1e9:g} cannot be met: the least possible is"
            f" {_gb(room.least_bytes)} GB, of which {_gb(room.fixed_bytes)} GB are weights that are"
            " not quantised (embeddings, norms, the LM head)"
        )
    return room


def _gb(num_bytes: int) -> str:
    """Rounded up, so that a budget of what is printed can be met."""
    return f"{math.ceil(num_bytes / 1e3) / 1e6:.6f}".rstrip("0").rstrip(".")


def _candidates(measured: Sensitivity) -> list[Candidate]:
    return [
        Candidate(str(scheme) if scheme else NO_SCHEME, size, measured.errors[scheme])
        for scheme, size in measured.num_bytes.items()
    ]


def _fits(scheme: QuantScheme, shape: tuple[int, ...]) -> bool:
    rows, columns = shape
    try:
        scheme.scale_shape(rows, columns)
    except VerifyError:
        return False
    return True
