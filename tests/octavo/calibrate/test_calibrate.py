"""Calibration over the graphs of tiny models: runs, scales, and matrices by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.calibrate.calibrate import Calibration, calibrate, graph_before_quantization
from octavo.calibrate.code_store import CodeStore
from octavo.calibrate.gptq import GPTQOptions, gptq
from octavo.calibrate.quantize_streamed import quantize_streamed, schemes_of
from octavo.calibrate.sequences import CalibrationOptions, sample_windows
from octavo.calibrate.streamed_run import StreamedRun
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.ops.paged import KVState
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import quantize
from octavo.ir.random_inputs import RandomSource
from octavo.passes.base import PassContext, Report, find_pass
from octavo.passes.fold_input_scales import find_folds
from octavo.passes.pipeline import run_pass, run_pipeline
from octavo.passes.quant_recipe import Quantization, Recipe
from tests.octavo.calibrate.tiny_model import SEQUENCES, TinyModel, TinyWeights, Traced
from tests.stage_logits import logits_of_one

INT4 = QuantScheme.parse("int4<1x32, f32>")
W8A8 = QuantScheme.parse("int8<1x*, f32, x=i8>")
EVERY_INT4 = Recipe("int4", (("*", INT4),))


def _logits(graph: Graph, weights: Any, sequences: list[list[int]] = SEQUENCES) -> Tensor:
    run = StreamedRun(graph, weights, sequences)
    run.advance(None)
    return torch.cat(list(run.values(graph.outputs[0])))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
@pytest.mark.parametrize("chunk", [12, 2048])
def test_a_streamed_run_gives_what_each_sequence_alone_gives(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr("octavo.calibrate.streamed_run._CHUNK_TOKENS", chunk)
    model = TinyModel(traced, name, torch.float64)
    expected = [logits_of_one(model.imported, ids, model.weights) for ids in SEQUENCES]
    found = _logits(model.graph, model.weights)
    torch.testing.assert_close(found.double(), torch.cat(expected).double(), rtol=1e-5, atol=1e-6)


def test_caches_have_memory_only_while_their_layer_runs(traced: Traced) -> None:
    model = TinyModel(traced, "llama", torch.float32)
    held: list[list[bool]] = []

    def observe(node: Any, results: Any) -> None:
        if "slot" in node.attrs and isinstance(results[0], KVState):
            held.append([bool(cache.untyped_storage().nbytes()) for cache in results[0].keys])

    run = StreamedRun(model.graph, model.weights, SEQUENCES, observe=observe)
    run.advance(None)
    assert held == [[True, False], [False, True]]


# Hugging Face's RMS norms compute in f32, so that in f64 they are several ops, which nothing folds.
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("llama", torch.float64, 4),
        ("llama", torch.float32, 8),
        ("gemma2", torch.float64, 8),
        ("gemma2", torch.float32, 16),
        ("gpt2", torch.float64, 6),
    ],
)
def test_scaled_inputs_change_nothing(
    traced: Traced, name: str, dtype: torch.dtype, count: int
) -> None:
    model = TinyModel(traced, name, dtype)
    expected = _logits(model.graph, model.weights)
    folds = list(find_folds(model.graph))
    assert len(folds) == count
    store = CodeStore(Path(), model.weights)
    generator = torch.Generator().manual_seed(5)
    for fold in folds:
        drawn = 0.2 + 3 * torch.rand(fold.x.shape[-1], generator=generator)
        # Powers of two, so that the scales themselves round nothing.
        scales = torch.exp2(fold.tied(drawn).log2().round())
        store.add_buffer(fold.key, scales)
        store.add_buffer(fold.maker_key, fold.factors(scales))
    names = frozenset(fold.x.name for fold in folds)
    context = PassContext(model.max_position, Quantization(scaled=names))
    run_pass(model.graph, "fold-input-scales", find_pass("fold-input-scales"), Report(context))
    assert not list(find_folds(model.graph))
    found = _logits(model.graph, store)
    # Gemma's w + 1 rounds; all else is exact.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_each_matrix_is_quantised_for_the_inputs_that_the_quantised_ones_give(
    traced: Traced,
) -> None:
    model = TinyModel(traced, "llama", torch.float32)
    schemes = schemes_of(model.graph, EVERY_INT4)
    options = GPTQOptions(follows_whole=False)
    made = dict(quantize_streamed(model.graph, model.weights, SEQUENCES, schemes, options))
    assert list(made) == list(schemes)
    assert len(made) == 8
    # The second layer's down projection, by a run with the matrices before it replaced by hand.
    name = "layers.1.mlp.down_proj.weight"
    run = StreamedRun(model.graph, model.weights, SEQUENCES)
    for key, matrix in made.items():
        if key != name:
            run.replace(model.graph.value(f"@{key}"), matrix.dequantize())
    (linear,) = model.graph.users(model.graph.value(f"@{name}"))
    run.advance(linear)
    x = torch.cat(list(run.values(linear.operand(0)))).double()
    weight = run.weight(linear.operand(1))
    expected = gptq(weight, x.T @ x, schemes[name])
    assert (made[name].codes == expected.codes).double().mean() > 0.999
    torch.testing.assert_close(made[name].scales, expected.scales)


def test_a_matrix_is_moved_to_what_the_whole_model_gives(traced: Traced) -> None:
    """By least squares: ``|G X - W Y|^2 + damping |G - W|^2`` for the inputs Y of the whole."""
    model = TinyModel(traced, "llama", torch.float32)
    schemes = schemes_of(model.graph, EVERY_INT4)
    made = dict(quantize_streamed(model.graph, model.weights, SEQUENCES, schemes, GPTQOptions()))
    name = "layers.1.mlp.down_proj.weight"
    (linear,) = model.graph.users(model.graph.value(f"@{name}"))
    runs = [StreamedRun(model.graph, model.weights, SEQUENCES) for _ in range(2)]
    for key, matrix in made.items():
        if key != name:
            runs[0].replace(model.graph.value(f"@{key}"), matrix.dequantize())
    for run in runs:
        run.advance(linear)
    x, y = (torch.cat(list(run.values(linear.operand(0)))).double() for run in runs)
    weight, hessian = runs[0].weight(linear.operand(1)), x.T @ x
    share = (0.01 * hessian.diagonal().mean()).sqrt() * torch.eye(len(hessian)).double()
    whole = weight.double()
    goal = torch.linalg.lstsq(
        torch.cat([x, share]), torch.cat([y @ whole.T, share @ whole.T])
    ).solution.T
    assert float((goal - whole).norm()) > 0.01 * float(whole.norm())
    expected = gptq(goal.float(), hessian, schemes[name])
    assert (made[name].codes == expected.codes).double().mean() > 0.99
    torch.testing.assert_close(made[name].scales, expected.scales, rtol=2**-7, atol=0)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_is_calibrated_is_closer_than_what_is_rounded(
    traced: Traced, tmp_path: Path, method: Any
) -> None:
    model = TinyModel(traced, "llama", torch.float32)
    generator = torch.Generator().manual_seed(8)
    text = torch.randint(256, (64 * 24,), generator=generator).tolist()
    other = [torch.randint(256, (64,), generator=generator).tolist() for _ in range(4)]
    exact = _logits(model.graph, model.weights, other)
    errors = {}
    for name in ("rtn", method):
        graph = graph_before_quantization(
            model.imported, max_position=model.max_position, target="cpu"
        )
        folder = tmp_path / name
        folder.mkdir()
        store, quantization = CodeStore(folder, model.weights), Quantization(EVERY_INT4)
        if name != "rtn":
            sequences = sample_windows(text, CalibrationOptions(24, 64))
            plan = Calibration(method)
            quantization = calibrate(graph, store, sequences, quantization, plan)
            graph = graph_before_quantization(
                model.imported, max_position=model.max_position, target="cpu"
            )
        passes = ("fold-input-scales", "quantize-linears")
        run_pipeline(
            graph, max_position=model.max_position, passes=passes, quantization=quantization
        )
        errors[name] = float((_logits(graph, store, other) - exact).square().mean())
    assert errors[method] < 0.9 * errors["rtn"]


def test_smoothed_inputs_have_columns_of_the_sizes_that_the_paper_says(
    traced: Traced, tmp_path: Path
) -> None:
    model = TinyModel(traced, "llama", torch.float32)
    fold = next(iter(find_folds(model.graph)))
    run = StreamedRun(model.graph, model.weights, SEQUENCES)
    run.advance(fold.linears[0])
    x = torch.cat(list(run.values(fold.x))).abs().amax(0)
    weight = run.weight(fold.linears[0].operand(1)).abs().amax(0)
    name = fold.key
    store = CodeStore(tmp_path, model.weights)
    recipe = Recipe("w8a8", (("*", W8A8),))
    found = calibrate(
        model.graph, store, SEQUENCES, Quantization(recipe), Calibration(method="gptq")
    )
    expected = (x / weight).sqrt()  # equation 4, alpha 0.5
    ratio = store.buffer(name) / expected
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)
    assert len(found.scaled) == 8


@pytest.mark.parametrize(
    "text",
    [
        "int4<1x32, bf16>",
        "uint4<1x32, f16, zero=u8>",
        "f4e2m1<1x32, f8e8m0>",
        "f8e4m3<128x128, f32, x=f8e4m3/128>",
        "int8<1x*, f32, x=i8>",
    ],
)
def test_a_store_gives_back_what_it_was_given(tmp_path: Path, text: str) -> None:
    matrix = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    made = quantize(matrix, QuantScheme.parse(text))
    store = CodeStore(tmp_path, TinyWeights(RandomSource(Graph("none")), {}))
    store.add_matrix("w", made)
    found = store.load_quantized("w")
    found.check()
    assert found.scheme == made.scheme
    for name, part in made.parts():
        assert getattr(found, name).view(torch.uint8).equal(part.view(torch.uint8)), name


def test_samples_are_spread_over_the_text() -> None:
    ids = list(range(1000))
    found = sample_windows(ids, CalibrationOptions(3, 100))
    assert [window[0] for window in found] == [0, 450, 900]
    assert all(window == ids[window[0] : window[0] + 100] for window in found)
    assert len(sample_windows(ids, CalibrationOptions(128, 100))) == 10
    assert sample_windows(ids[:130], CalibrationOptions(128, 100)) == [ids[:100]]
    with pytest.raises(OctavoError, match="99 tokens"):
        sample_windows(ids[:99], CalibrationOptions(1, 100))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(OctavoError, match="unknown quantisation method 'best'"):
        Calibration(method="best")  # type: ignore[arg-type]
