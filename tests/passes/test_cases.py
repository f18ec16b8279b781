"""Each pass does to each of its cases just what the case says, and the numbers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import octavo.passes
from octavo.ir.graph import Graph, Value
from octavo.ir.interpret import Result, interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.random_inputs import RandomSource, random_inputs
from octavo.ir.verify import verify
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.fold_input_scales import InputFold, find_folds
from octavo.passes.pipeline import PIPELINES, run_pass
from octavo.passes.quant_recipe import Quantization, Recipe
from tests.passes.case_file import CASES, Case, read_cases, write_cases
from tests.tolerances import assert_same

FILES = sorted(CASES.glob("*.ir"))
_INT4 = QuantScheme.parse("int4<1x32, f32>")
_INT8 = QuantScheme.parse("int8<1x*, f32>")
RECIPE = Recipe("mixed", (("*.v_proj", _INT8), ("skip", None), ("*", _INT4)))


def _why_no_kernel(scheme: QuantScheme) -> str | None:
    return "there is no kernel for nf4" if scheme.codes == "nf4" else None


CONTEXT = PassContext(
    16, Quantization(RECIPE, why_no_kernel=_why_no_kernel, can_embed=lambda scheme: scheme == _INT8)
)


class Lattice(RandomSource):
    """Matrices that the schemes of RECIPE hold without a loss, so that no pass changes numbers:
    multiples of 1/16, the largest code of the scheme in each block."""

    def load(self, key: str) -> Tensor:
        drawn = super().load(key)
        if drawn.dim() != 2:
            return drawn
        largest = 127 if "v_proj" in key else 7
        codes = (drawn * largest).round().clamp(-largest, largest)
        codes[:, ::32] = largest
        return codes / 16


class Scales(RandomSource):
    """Scales for every input that can have some, and what they make of its maker."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._folds = {name: fold for fold in find_folds(graph) for name in _keys(fold)}

    def buffer(self, key: str) -> Tensor:
        fold = self._folds[key]
        generator = torch.Generator().manual_seed(len(fold.key))
        scales = fold.tied(0.5 + 2 * torch.rand(fold.x.shape[-1], generator=generator))
        return scales if key == fold.key else fold.factors(scales)


def _keys(fold: InputFold) -> tuple[str, str]:
    return fold.key, fold.maker_key


SOURCES = {"quantize-linears": Lattice, "fold-input-scales": Scales}
# What was cached before has values that are not scaled: these sequences have no past.
NO_PAST = {
    "slot_mapping": torch.arange(7),
    "block_table": torch.arange(2, dtype=torch.int32)[None],
    "query_start": torch.tensor([0, 7], dtype=torch.int32),
    "seq_lens": torch.tensor([7], dtype=torch.int32),
}


def _apply(case: Case, graph: Graph) -> tuple[int, Report]:
    takes_recipe = case.pass_name == "quantize-linears" or "recipe" in case.id
    context = CONTEXT if takes_recipe else PassContext(CONTEXT.max_position)
    if case.pass_name == "fold-input-scales":
        names = frozenset(fold.x.name for fold in find_folds(graph))
        context = replace(context, quantization=Quantization(scaled=names))
    report = Report(context)
    return run_pass(graph, case.pass_name, find_pass(case.pass_name), report), report


def _text(graph: Graph) -> str:
    return print_graph(graph, fold=False, origins=False)


def _results(graph: Graph, case: Case) -> list[Result]:
    # The inputs and weights of the case as it was: passes add parameters, never drop any.
    before = parse_graph(case.before)
    given = {value.name for value in before.inputs}
    # A pass that pages sees one sequence, as attention did; one that narrows the logits, all rows.
    sizes = {"T": 7, "R": 7} if "kv" in given else {"T": 7, "R": 7, "S": 1}
    inputs = {**random_inputs(graph, sizes), **random_inputs(before, sizes)}
    if "logit_rows" not in given:
        inputs["logit_rows"] = torch.arange(sizes["R"])
    shaped = {value.name: _fitted(inputs[value.name], value) for value in graph.inputs}
    if case.pass_name == "fold-input-scales":
        shaped |= {name: past for name, past in NO_PAST.items() if name in shaped}
    return interpret(graph, shaped, SOURCES.get(case.pass_name, RandomSource)(before))


def _fitted(given: Result, value: Value) -> Result:
    """A parameter without its batch dim, where the pass took it off."""
    if isinstance(given, Tensor) and given.dim() == value.tensor.rank + 1:
        return given.squeeze(0)
    return given


def _assert_same_results(got: list[Result], want: list[Result]) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=False)):
        assert type(one) is type(other)
        if isinstance(one, KVState) and isinstance(other, KVState):
            for a, b in zip(one.tensors(), other.tensors(), strict=True):
                assert_same(_bits_of_codes(a), _bits_of_codes(b), f"cache of result {index}")
        elif isinstance(one, Tensor) and isinstance(other, Tensor):
            # Logits become f32; their precision is that of the dtype they had.
            assert_same(one.to(other.dtype), other.reshape(one.shape), f"result {index}")


def _bits_of_codes(cache: Tensor) -> Tensor:
    """Codes are equal or not, whatever they stand for."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@pytest.mark.parametrize("case", [c for f in FILES for c in read_cases(f)], ids=lambda c: c.id)
def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    graph = parse_graph(case.before)
    verify(graph)
    want = _results(graph, case)
    _, report = _apply(case, graph)
    missed = tuple(f"{miss.where}: {miss.reason}" for miss in report.misses)
    if request.config.getoption("--update-cases", default=False):
        _update(replace(case, after=_text(graph), missed=missed))
        return
    assert _text(graph) == case.after
    assert missed == case.missed
    _assert_same_results(_results(graph, case), want)


@pytest.mark.parametrize("case", [c for f in FILES for c in read_cases(f)], ids=lambda c: c.id)
def test_second_run_changes_nothing(case: Case) -> None:
    graph = parse_graph(case.before)
    _apply(case, graph)
    once = _text(graph)
    rewrites, _ = _apply(case, graph)
    assert rewrites == 0
    assert _text(graph) == once


def _update(case: Case) -> None:
    path = CASES / f"{case.pass_name}.ir"
    cases = read_cases(path)
    cases[case.index] = case
    write_cases(path, cases)


def test_every_pass_has_cases() -> None:
    files = Path(octavo.passes.__path__[0]).glob("*.py")
    named = {f.stem.replace("_", "-") for f in files if "@register_pass(" in f.read_text()}
    assert named == {path.stem for path in FILES}
    assert {name for names in PIPELINES.values() for name in names} <= named
