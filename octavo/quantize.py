"""What ``--quant`` names: recipes of known schemes, and those that a YAML file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from octavo.codegen.target import Target
from octavo.ir.errors import OctavoError, VerifyError
from octavo.ir.graph import Graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import QuantType
from octavo.passes.fused_linear import LINEARS
from octavo.passes.pipeline import Stage
from octavo.passes.quant_recipe import HEAD, Recipe
from octavo.passes.quantize_linears import GROUPS, KEPT

_FIXED = {
    "int8": "int8<1x*, f32>",
    "int8-w8a8": "int8<1x*, f32, x=i8>",
    "fp8": "f8e4m3<1x*, f32, x=f8e4m3>",
    "fp8-tensor": "f8e4m3<*x*, f32, x=f8e4m3>",
    "fp8-block": "f8e4m3<128x128, f32, x=f8e4m3/128>",
    "mxfp4": "f4e2m1<1x32, f8e8m0>",
    "nf4": "nf4<1x64, f32>",
}
_BALANCED = (
    ("first.*", "none"),
    ("last.*", "none"),
    ("*attn*", "fp8"),
    ("*attention*", "fp8"),
    ("*mlp*", "int4"),
    ("*feed_forward*", "int4"),
)
NO_SCHEME = "none"
# In an artifact, what its linears were quantised by.
RECIPE_FILE = "ir/recipe.yaml"


def scheme_names() -> list[str]:
    """All schemes that have a name."""
    groups = [f"int4{kind}-g{size}" for kind in ("", "-asym") for size in GROUPS]
    return ["int4", "int4-asym", *groups, *_FIXED]


def find_recipe(
    quant: str | Path, *, dtype: str, head: str | None = None, target: Target | None = None
) -> Recipe:
    """The recipe of a name, of a scheme's text or of a YAML file; ``head`` is the LM head's scheme.

    ``dtype`` is the model's in the IR. Raises OctavoError for what is none of these, and for a
    scheme that ``target`` has no kernel for.
    """
    text = str(quant)
    if text.endswith((".yaml", ".yml")):
        recipe = _read_recipe(Path(quant), dtype)
    elif text == "balanced":
        recipe = Recipe(text, tuple((p, _scheme(s, dtype)) for p, s in _BALANCED))
    else:
        others = "balanced, or a .yaml file of patterns and schemes"
        recipe = Recipe(text, (("*", _scheme(text, dtype, others)),))
    _check_kernels(f"--quant {text}", recipe, target)
    if head is None:
        return recipe
    first = Recipe(f"{recipe.name}, head {head}", ((HEAD, _scheme(head, dtype)),))
    _check_kernels(f"--quant-head {head}", first, target)
    return replace(recipe, name=first.name, rules=(*first.rules, *recipe.rules))


def _check_kernels(option: str, recipe: Recipe, target: Target | None) -> None:
    for _, scheme in recipe.rules:
        reason = target.why_no_kernel(scheme) if target and scheme else None
        if reason is not None:
            raise OctavoError(f"{option}: {reason}")


def find_schemes(names: Iterable[str], dtype: str, targets: Iterable[Target]) -> list[QuantScheme]:
    """Of these schemes by name those that all targets have kernels for."""
    found = [_scheme(name, dtype) for name in names]
    return [
        scheme
        for scheme in found
        if scheme is not None and not any(target.why_no_kernel(scheme) for target in targets)
    ]


def _scheme(name: str, dtype: str, others: str = "or none") -> QuantScheme | None:
    """The scheme of a name or a text; None for ``none``. ``others`` is what else can be written
    in this place."""
    if name == NO_SCHEME:
        return None
    if name in _FIXED:
        return QuantScheme.parse(_FIXED[name])
    # Half the bytes of f32, and as exact as codes of 4 bits need them.
    scale = "f16" if dtype == "f16" else "bf16"
    kind, _, group = name.partition("-g")
    if kind in ("int4", "int4-asym") and (group or "128") in map(str, GROUPS):
        codes, zero = ("int4", "") if kind == "int4" else ("uint4", ", zero=u8")
        return QuantScheme.parse(f"{codes}<1x{group or 128}, {scale}{zero}>")
    try:
        return QuantScheme.parse(name)
    except VerifyError as error:
        if "<" in name:
            raise OctavoError(str(error)) from None
        raise OctavoError(
            f"{name!r} is no way to quantise: choose {', '.join(scheme_names())}, a scheme such as"
            f" int4<1x64, bf16>, {others}"
        ) from None


def _read_recipe(path: Path, dtype: str) -> Recipe:
    try:
        text = path.read_text("utf-8")
        found: Any = yaml.safe_load(text)
        written: Any = yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OctavoError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not found:
        raise OctavoError(
            f"{path}: expected patterns over module paths with schemes, as in `'*.mlp.*': int4`"
        )
    patterns = Counter(key.value for key, _ in written.value)
    twice = [pattern for pattern, count in patterns.items() if count > 1]
    if twice:
        raise OctavoError(f"{path}: {twice[0]!r} stands there twice; leave one of the lines out")
    rules = []
    for pattern, name in found.items():
        if not isinstance(pattern, str) or not isinstance(name, str | None):
            raise OctavoError(f"{path}: expected a pattern and a scheme, got {pattern!r}: {name!r}")
        try:
            rules.append((pattern, _scheme(name or NO_SCHEME, dtype)))
        except OctavoError as error:
            raise OctavoError(f"{path}: {pattern}: {error}") from None
    return Recipe(path.stem, tuple(rules), is_for_model=True)


def recipe_text(recipe: Recipe) -> str:
    """A recipe as YAML that ``find_recipe`` reads, with the text of each scheme."""
    rules = {pattern: str(scheme or NO_SCHEME) for pattern, scheme in _first_rules(recipe)}
    text: str = yaml.safe_dump(rules, sort_keys=False, allow_unicode=True)
    return text


def recipe_difference(one: Recipe, other: Recipe) -> str | None:
    """The first line in which two recipes differ, in words; None where they say the same."""
    for mine, yours in zip_longest(_first_rules(one), _first_rules(other)):
        if mine != yours:
            return f"{one.name} has {_line(mine)}, {other.name} has {_line(yours)}"
    return None


def _first_rules(recipe: Recipe) -> list[tuple[str, QuantScheme | None]]:
    """Without those whose pattern stands there before."""
    rules: dict[str, QuantScheme | None] = {}
    for pattern, scheme in recipe.rules:
        rules.setdefault(pattern, scheme)
    return list(rules.items())


def _line(rule: tuple[str, QuantScheme | None] | None) -> str:
    return "no more lines" if rule is None else f"'{rule[0]}': {rule[1] or NO_SCHEME}"


def unquantized_notices(recipe: Recipe, stages: Iterable[Stage]) -> list[str]:
    """What to say where a recipe has patterns without a match, speaks of matrices that the
    checkpoint holds quantised, or quantised nothing at all."""
    [stage] = [stage for stage in stages if stage.name == "quantize-linears"]
    patterns = {pattern for pattern, _ in recipe.rules}
    notices = [f"{m.where!r}: {m.reason}" for m in stage.missed if m.where in patterns]
    kept = sum(m.reason == KEPT for m in stage.missed)
    if kept:
        notices.append(f"{recipe.name} leaves {kept} linears as they are: {KEPT}")
    if not stage.rewrites and any(scheme for _, scheme in recipe.rules):
        notices.append(f"nothing was quantised: {stage.summary}")
    return notices


def count_schemes(graph: Graph) -> dict[str, int]:
    """How many linears multiply by matrices of each scheme; empty where none is quantised."""
    types = [node.operand(1).type for node in graph.find(*LINEARS)]
    found = Counter(str(t.scheme) for t in types if isinstance(t, QuantType))
    return dict(sorted(found.items()))
