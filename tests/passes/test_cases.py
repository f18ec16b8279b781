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
from octavo.ir.random_inputs import RandomSource, random_inputs
from octavo.ir.verify import verify
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.pipeline import PIPELINES, run_pass
from tests.passes.case_file import CASES, Case, read_cases, write_cases
from tests.tolerances import assert_same

FILES = sorted(CASES.glob("*.ir"))
CONTEXT = PassContext(max_position=16)


def _apply(case: Case, graph: Graph) -> tuple[int, Report]:
    report = Report(CONTEXT)
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
    return interpret(graph, shaped, RandomSource(before))


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
