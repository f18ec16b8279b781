"""The figures of an evaluation, against what transformers and PyTorch say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command_line import Command
from filelock import FileLock
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo.evaluate.distributions import LossMeter
from octavo.evaluate.evaluate import compare, evaluate
from octavo.evaluate.models import ArtifactModel
from octavo.evaluate.windows import PASSAGE, WindowOptions, windows
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from tests.end_to_end.tiny_llama import write_checkpoint


@pytest.fixture(scope="module")
def pair(session_dir: Path) -> tuple[Path, Path, Path]:
    """A checkpoint, the same with its weights disturbed, and that one compiled."""
    from octavo.compile import compile_model

    folder = session_dir / "evaluated"
    with FileLock(session_dir / "evaluated.lock"):
        if not folder.exists():
            write_checkpoint(folder / "model")
            write_checkpoint(folder / "other")
            model = AutoModelForCausalLM.from_pretrained(folder / "other")
            torch.manual_seed(3)
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
            model.save_pretrained(folder / "other")
            compile_model(folder / "other", folder / "artifact", target="cpu", progress=False)
    return folder / "model", folder / "other", folder / "artifact"


def _tokens(path: Path) -> list[int]:
    """The passage by the tokenizer's own library."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(PASSAGE.read_text("utf-8"), add_special_tokens=False).ids
    return ids


def _logits(path: Path, ids: Sequence[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def test_figures_are_those_of_transformers_and_pytorch(pair: tuple[Path, Path, Path]) -> None:
    model, other, artifact = pair
    options = WindowOptions(context=40, stride=30, max_tokens=100)
    found = evaluate(artifact, model, options=options).loss

    ids = _tokens(model)[:100]
    expected, got, targets = [], [], []
    for start, stop, first in [(0, 40, 1), (30, 70, 10), (60, 100, 10)]:
        expected.append(_logits(model, ids[start:stop])[first - 1 : -1])
        got.append(_logits(other, ids[start:stop])[first - 1 : -1])
        targets += ids[start + first : stop]
    reference, ours, goal = torch.cat(expected), torch.cat(got), torch.tensor(targets)
    kl = F.kl_div(ours.log_softmax(-1), reference.softmax(-1), reduction="none").sum(-1)
    assert found.num_tokens == 99
    assert found.perplexity == pytest.approx(F.cross_entropy(ours, goal).exp().item(), rel=1e-5)
    wanted = F.cross_entropy(reference, goal).exp().item()
    assert found.reference_perplexity == pytest.approx(wanted, rel=1e-5)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-3)
    agreed = (reference.argmax(-1) == ours.argmax(-1)).double().mean().item()
    assert found.top1_agreement == pytest.approx(agreed)
    assert found.kl_mean > 1e-3


def test_errors_of_modules_are_those_of_what_their_modules_give(
    pair: tuple[Path, Path, Path],
) -> None:
    model, other, artifact = pair
    found = evaluate(artifact, model, options=WindowOptions(32, 32, 64))
    ids = torch.tensor([_tokens(model)[:32]])
    given: list[dict[str, Tensor]] = []
    for path in (model, other):
        eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        with torch.no_grad():
            hidden = eager(ids, output_hidden_states=True).hidden_states
        given.append({f"layers.{i}": each[0] for i, each in enumerate(hidden[1:-1])})
    errors = {module.path: module.error for module in found.modules}
    for path, expected in given[0].items():
        wanted = ((given[1][path] - expected).norm() / expected.norm()).item()
        assert errors[path] == pytest.approx(wanted, rel=1e-3)
    assert {"layers.0", "layers.1"} <= {module.path for module in found.layers}
    names = {module.path for module in found.worst(100)}
    assert {"layers.1.mlp.down_proj", "layers.0.self_attn.q_proj"} <= names
    worst = [module.error for module in found.worst(5)]
    assert worst == sorted(worst, reverse=True)


def test_an_artifact_of_the_model_itself_loses_nothing(pair: tuple[Path, Path, Path]) -> None:
    _, other, artifact = pair
    for against in (other, artifact):
        found = evaluate(artifact, against, options=WindowOptions(64, 64, 200))
        assert abs(found.loss.perplexity_increase) < 1e-4
        assert found.loss.kl_p99 < 1e-5
        assert found.loss.top1_agreement == 1.0
        assert max(module.error for module in found.modules) < 1e-4


def test_a_window_of_several_steps(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other, artifact = pair
    monkeypatch.setattr("octavo.runtime.window_logits._STEP_TOKENS", 16)
    ids = _tokens(other)[:40]
    got, want = ArtifactModel(Artifact.open(artifact), 40).logits(ids), _logits(other, ids)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_modules_of_an_artifact_with_a_kv_cache_of_codes(
    dtype: str, pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    from octavo.compile import compile_model

    model = pair[1]
    artifact = tmp_path / dtype
    compile_model(model, artifact, target="cpu", kv_cache_dtype=dtype, progress=False)
    found = evaluate(artifact, model, options=WindowOptions(32, 32, 64))
    errors = {module.path: module.error for module in found.modules}
    # Keys and values are rounded after their projections, and nothing else is.
    assert errors["layers.0.self_attn.v_proj"] < 1e-4
    assert 1e-4 < errors["layers.0"] < 0.1


@dataclass
class _Fixed:
    """A model that says the same after every token."""

    rows: Tensor

    def logits(self, ids: Sequence[int]) -> Tensor:
        return self.rows.expand(len(ids), -1)

    def hidden(self, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        yield from ()


def test_known_distributions_give_known_figures() -> None:
    fair = _Fixed(torch.zeros(4))
    bent = _Fixed(torch.tensor([0.5, 0.25, 0.125, 0.125]).log())
    loss = compare(bent, fair, [0, 0, 1, 2, 0], WindowOptions(5, 5), with_modules=False).loss
    assert loss.num_tokens == 4
    assert loss.reference_perplexity == pytest.approx(4)
    assert loss.perplexity == pytest.approx((2 * 4 * 8 * 2) ** 0.25)
    assert loss.kl_mean == pytest.approx(0.25 * torch.tensor([0.5, 1, 2, 2]).log().sum().item())
    meter = LossMeter()
    meter.add(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    assert meter.loss().kl_mean == pytest.approx(torch.tensor(2.0).log().item())


@pytest.mark.parametrize("length", [2, 9, 10, 11, 25, 31])
@pytest.mark.parametrize(("context", "stride"), [(10, 10), (10, 3), (7, 6), (2, 1)])
def test_windows_predict_each_token_once(length: int, context: int, stride: int) -> None:
    text = list(range(length))
    found = list(windows(text, WindowOptions(context, stride)))
    predicted = [token for window in found for token in window.ids[window.first :]]
    # Where windows do not overlap, nothing precedes their first tokens.
    missing = set(range(0, length, stride)) if stride == context else {0}
    assert predicted == [token for token in text if token not in missing]
    assert all(len(window.ids) <= context for window in found)


def test_what_cannot_be_evaluated_is_refused(pair: tuple[Path, Path, Path]) -> None:
    _, _, artifact = pair
    with pytest.raises(OctavoError, match="stride of 9 with a context of 8"):
        WindowOptions(8, 9)
    with pytest.raises(OctavoError, match="0 tokens"):
        list(windows([], WindowOptions()))
    with pytest.raises(OctavoError, match="choose --context 256 or less"):
        evaluate(artifact, artifact, options=WindowOptions(257, 257))
    with pytest.raises(OctavoError, match="cannot be read"):
        evaluate(artifact, artifact, text=artifact / "no such text", options=WindowOptions(64, 64))


def test_the_command_prints_a_table_and_json(
    pair: tuple[Path, Path, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, artifact = pair
    command = Command(capfd, monkeypatch)
    asked = ("evaluate", artifact, "--against", model, "--max-tokens", "80", "--context", "40")
    table = command(*asked).stdout
    for word in ("perplexity", "KL divergence, mean", "same top token", "layers.0.mlp.down_proj"):
        assert word in table
    body = json.loads(command(*asked, "--json").stdout)
    assert body["num_tokens"] == 78
    assert body["perplexity_increase"] == body["perplexity"] / body["reference_perplexity"] - 1
    assert body["modules"]["layers.1"] > 0
