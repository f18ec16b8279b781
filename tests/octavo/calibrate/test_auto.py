"""Recipes chosen under a budget, over the graph of a tiny model."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

from octavo.calibrate.auto import AutoRecipe, Choice, choose_recipe
from octavo.calibrate.sensitivity import Sensitivity, measure_sensitivity
from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import quantize
from tests.octavo.calibrate.tiny_model import SEQUENCES, TinyModel, Traced

INT4 = QuantScheme.parse("int4<1x32, bf16>")
INT8 = QuantScheme.parse("int8<1x*, f32>")
NAMES = [
    f"layers.{i}.{part}.weight"
    for i in range(2)
    for part in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def measured(traced: Traced) -> tuple[TinyModel, list[Sensitivity]]:
    model = TinyModel(traced, "llama", torch.float32)
    schemes = dict.fromkeys(NAMES, (INT4, INT8))
    found = measure_sensitivity(model.graph, model.weights, SEQUENCES, schemes)
    return model, list(found)


def test_errors_are_those_of_the_products(
    measured: tuple[TinyModel, list[Sensitivity]],
) -> None:
    model, found = measured
    assert [each.name for each in found] == NAMES
    run = StreamedRun(model.graph, model.weights, SEQUENCES)
    for each in found:
        (linear,) = model.graph.users(model.graph.value(f"@{each.name}"))
        run.advance(linear)
        x = torch.cat(list(run.values(linear.operand(0)))).double()
        weight = run.weight(linear.operand(1))
        for scheme in (INT4, INT8):
            made = quantize(weight, scheme, importance=x.square().sum(0).float())
            gap = x @ (weight - made.dequantize()).double().T
            expected = (gap.norm() / (x @ weight.double().T).norm()) ** 2
            assert each.errors[scheme] == pytest.approx(expected.item(), rel=1e-3)
            stored = sum(part.nbytes for name, part in made.parts() if name != "codes")
            stored += made.codes.numel() * scheme.format.bits // 8
            assert each.num_bytes[scheme] == stored


def test_the_recipe_is_the_best_of_all_within_the_budget(
    measured: tuple[TinyModel, list[Sensitivity]],
) -> None:
    model, found = measured
    weights = model.graph.used_weights()
    fixed = sum(w.tensor.num_bytes({}) for w in weights if w.name not in NAMES)
    budget = fixed + 60_000
    auto = choose_recipe(model.graph, model.weights, SEQUENCES, (INT4, INT8), budget)
    best = min(
        sum(each.errors[s] for each, s in zip(found, choice, strict=True))
        for choice in product((None, INT4, INT8), repeat=len(found))
        if sum(e.num_bytes[s] for e, s in zip(found, choice, strict=True)) <= 60_000
    )
    assert sum(choice.error for choice in auto.choices) == pytest.approx(best, rel=1e-6)
    assert auto.total_bytes <= budget
    assert len({choice.scheme for choice in auto.choices}) > 1
    assert auto.choices[0].modules == tuple(
        f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
    )


def test_a_budget_that_cannot_be_met_is_refused(
    measured: tuple[TinyModel, list[Sensitivity]],
) -> None:
    model, _ = measured
    said = r"--budget-gb 0\.0001 cannot be met: the least possible is (?P<gb>[\d.]+) GB"
    with pytest.raises(OctavoError, match=said) as refused:
        choose_recipe(model.graph, model.weights, SEQUENCES, (INT4, INT8), 100_000)
    least = re.search(said, str(refused.value))
    assert least is not None
    budget = int(float(least["gb"]) * 1e9)
    auto = choose_recipe(model.graph, model.weights, SEQUENCES, (INT4, INT8), budget)
    assert budget - 1000 <= auto.total_bytes <= budget


def test_a_recipe_is_written_as_it_is_read(tmp_path: Path) -> None:
    auto = AutoRecipe(
        (
            Choice(("model.layers.0.q_proj", "model.layers.0.k_proj"), str(INT4), 1000, 1e-3),
            Choice(("model.layers.0.o_proj",), "none", 2000, 0.0),
        ),
        5000,
    )
    body = yaml.safe_load(auto.to_yaml())
    assert body == {
        "model.layers.0.q_proj": str(INT4),
        "model.layers.0.k_proj": str(INT4),
        "model.layers.0.o_proj": "none",
    }
    assert dict(auto.recipe.rules)["model.layers.0.o_proj"] is None
    assert dict(auto.recipe.rules)["model.layers.0.k_proj"] == INT4
