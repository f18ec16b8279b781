"""``octavo bench``, the H200's script and the examples, on a tiny model on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import ROOT, Command, assert_refused

from benchmarks.h200 import run as h200
from octavo.bench import profile_kernels, roofline
from octavo.bench.profile_modules import profile_modules
from octavo.bench.results import Results, write_results
from octavo.bench.suite import Plan, Suite, artifact_of
from octavo.bench.traffic import Traffic
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.llm import LLM


@pytest.fixture(autouse=True)
def _quick_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "_CPU_SIZE", 64)


SMALL = ("--input-len", "6", "--output-len", "8", "--repeats", "1")


def test_traffic_of_a_compiled_model(tiny_artifact: Path) -> None:
    traffic = Traffic.of(Artifact.open(tiny_artifact))
    # Two layers of hidden size 64: QKV, output, gate and up, down; then the head of 260 rows.
    linears = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)
    assert (traffic.matmul_elements, traffic.head_elements) == (linears, 260 * 64)
    norms = 5 * 64
    assert traffic.weight_bytes == 4 * (linears + 260 * 64 + norms)
    assert traffic.kv_bytes(1) == 2 * 2 * (16 + 16) * 4


def test_modules_of_a_step_with_their_bytes(tiny_artifact: Path) -> None:
    artifact, device = Artifact.open(tiny_artifact), torch.device("cpu")

    def timer(body: Callable[[], None]) -> float:
        body()
        return 0.5

    [profile] = profile_modules(artifact, device, timer, batch_sizes=[3], context=40, bandwidth=1e6)
    found = {kernel.name.split("_")[0]: kernel for kernel in profile.kernels}
    # Two layers of 3 sequences: K and V of 40 tokens, and at least Q and the result.
    attention = found["paged"]
    assert attention.num_calls == 2
    keys = 2 * 3 * 40 * 2 * (16 + 16) * 4
    assert keys < (attention.num_bytes or 0) < 1.5 * keys
    assert attention.microseconds == 0.5e6
    assert attention.share == (attention.num_bytes or 0) / 1e6 / 0.5


def test_a_profiled_batch_decodes_and_is_then_gone(tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact, max_num_seqs=4, max_model_len=64, skip_tokenizer_init=True)
    running = profile_kernels._Running.start(llm, batch_size=3, context=8)
    before = llm.stats()
    assert (before.num_running, before.num_waiting) == (3, 0)
    llm.engine.step()
    assert llm.stats().output_tokens == before.output_tokens + 3
    running.end()
    after = llm.stats()
    assert (after.num_running, after.num_free_blocks) == (0, after.num_total_blocks)


def test_everything_at_once(octavo_here: Command, tiny_artifact: Path, tmp_path: Path) -> None:
    requests, output, png = (tmp_path / name for name in ("r.json", "out.json", "plot.png"))
    requests.write_text("[[3, 5], [4, 1]]")
    done = octavo_here(
        *("bench", tiny_artifact, "--batch-size", "3,1", *SMALL, "--prefill", "2x9"),
        *("--requests", requests, "--startup", "--compare-hf"),
        *("--output", output, "--plot", png),
    )
    assert done.returncode == 0, done.stderr
    for title in ("Decode", "Prefill", "Throughput", "Process start to first token"):
        assert title in done.stdout
    results = Results.from_json(output.read_text())
    assert results.failures == []
    assert [(d.engine, d.batch_size) for d in results.decode] == [
        ("octavo", 1),
        ("octavo", 3),
        ("hugging face", 1),
        ("hugging face", 3),
    ]
    assert all(d.tokens_per_second > 0 and d.efficiency for d in results.decode)
    assert [d.share is None for d in results.decode] == [False, False, True, True]
    assert (results.prefill[0].num_prompts, results.prefill[0].input_len) == (2, 9)
    assert results.throughput[0].output_tokens == 6
    phases = results.startup[0].phases
    assert list(phases)[:2] == ["start Python", "import"]
    assert list(phases)[-1] == "first token"
    assert results.command[:2] == ["octavo", "bench"]
    assert png.exists()


def test_decode_is_left_out_where_only_prefill_is_asked_for(
    octavo_here: Command, tiny_artifact: Path
) -> None:
    done = octavo_here("bench", tiny_artifact, "--prefill", "1x5", "--repeats", "1")
    assert done.returncode == 0
    assert "Prefill" in done.stdout
    assert "Decode" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-size", "1,,2"), ("--batch-size '1,,2'", "1,4,8,16")),
        (("--prefill", "16*4"), ("--prefill '16*4'", "16x2048")),
        (("--requests", "no.json"), ("no.json", "No such file")),
    ],
)
def test_bad_options_are_refused(
    octavo_here: Command, tiny_artifact: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(octavo_here("bench", tiny_artifact, *options), *words)


def test_a_model_that_does_not_exist_is_refused(octavo_here: Command) -> None:
    assert octavo_here("bench", "./missing").returncode == 2


def test_a_part_that_fails_ends_alone(tiny_artifact: Path) -> None:
    saved: list[int] = []
    plan = Plan(
        batch_sizes=(1, 40), input_len=4, output_len=8, repeats=1, options={"max_num_seqs": 8}
    )
    suite = Suite(tiny_artifact, plan, [], save=lambda results: saved.append(len(results.decode)))
    results = suite.run()
    assert [figure.batch_size for figure in results.decode] == [1]
    [failure] = results.failures
    assert failure.startswith("decode, batch 40: OctavoError: ")
    assert saved == [1, 1, 1]


def test_nothing_is_begun_when_the_time_is_up(tiny_artifact: Path) -> None:
    suite = Suite(tiny_artifact, Plan(batch_sizes=(1,)), [], seconds=-1.0)
    with pytest.raises(OctavoError, match="load: OctavoError: not begun, the time was up"):
        suite.run()


def test_a_profile_beyond_the_models_length_is_refused_once(tiny_artifact: Path) -> None:
    suite = Suite(tiny_artifact, Plan(profile=(1,), input_len=10**6, repeats=1), [])
    with pytest.raises(OctavoError, match="nothing was measured: load: InvalidRequest") as caught:
        suite.run()
    assert "is beyond the model's own maximum" in str(caught.value)
    assert "modules of a decode step" not in str(caught.value)


def test_a_config_alone_runs_with_random_weights(tiny_checkpoint: Path) -> None:
    with artifact_of(tiny_checkpoint / "config.json") as path:
        results = Suite(path, Plan(prefill=((1, 4),), repeats=1), []).run()
        assert len(results.prefill) == 1
    assert not path.exists()


def test_the_script_for_the_h200_writes_results(
    tiny_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    small = dataclasses.replace(
        h200.PLAN, input_len=4, output_len=8, prefill=((2, 9),), requests=((3, 2),), options={}
    )
    monkeypatch.setattr(h200, "PLAN", small)
    only = ("--only", "decode", "prefill", "requests", "--batch-size", "1", "2", "--repeats", "1")
    missing = tmp_path / "missing"
    (tmp_path / "missing.json").write_text("what an earlier run left")
    arguments = [str(missing), str(tiny_artifact), "--output", str(tmp_path), *only]
    h200.main([*arguments, "--tune", "9"])
    results = Results.from_json((tmp_path / f"{tiny_artifact.name}.json").read_text())
    assert [figure.batch_size for figure in results.decode] == [1, 2]
    assert (len(results.prefill), len(results.throughput), results.startup) == (1, 1, [])
    assert results.command == ["python", "-m", "benchmarks.h200.run", *arguments, "--tune", "9"]
    shown = capfd.readouterr()
    assert f"{missing}: not measured" in shown.out
    # A failed tuning has stopped nothing, and says why: the children's output is passed through.
    assert f"{tiny_artifact}: not tuned" in shown.out
    assert "only Triton kernels are tuned" in shown.err
    assert f"{tiny_artifact.name}: decode, batch 2" in shown.out
    assert "Decode" in shown.out


def test_a_process_of_its_own_may_fail_or_die(tmp_path: Path) -> None:
    assert h200.in_own_process((tmp_path / "made").mkdir)
    assert (tmp_path / "made").is_dir()
    assert not h200.in_own_process((tmp_path / "made").mkdir)
    assert h200.in_own_process(os._exit, 0)
    assert not h200.in_own_process(os._exit, 3)
    assert not h200.in_own_process(signal.raise_signal, signal.SIGKILL)


def test_what_a_process_saved_before_it_died_counts(
    tiny_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / f"{tiny_artifact.name}.json"
    plan = Plan(batch_sizes=(1,), input_len=4, output_len=8, repeats=1)

    def one_part(target: object, *arguments: object) -> bool:
        """A process that saves a part and dies."""
        Suite(tiny_artifact, plan, [], save=lambda results: write_results(results, path)).run()
        return False

    monkeypatch.setattr(h200, "in_own_process", one_part)
    results = h200._measured(tiny_artifact, h200.PLAN, [], tmp_path, 60.0)
    assert results is not None
    assert [figure.batch_size for figure in results.decode] == [1]
    assert "its process failed, not all is measured" in capfd.readouterr().out
    path.write_text("{")
    monkeypatch.setattr(h200, "in_own_process", lambda *_: path.write_text('{"sch') < 0)
    assert h200._measured(tiny_artifact, h200.PLAN, [], tmp_path, 60.0) is None
    assert "not measured" in capfd.readouterr().out


def test_the_requests_of_the_h200_are_500() -> None:
    assert len(h200.PLAN.requests) == 500
    assert json.loads(h200.REQUESTS.read_text())[0] == list(h200.PLAN.requests[0])


def example(name: str) -> ModuleType:
    """The names of an example script, which is no module of any package."""
    module = ModuleType(name)
    vars(module).update(runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name))
    return module


def test_the_service_example_prints_a_row_for_each_batch(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batch-size", "1", "2", "--input-len", "4", "--output-len", "8")
    example("service").main([str(tiny_artifact), *sizes, "--plot", str(tmp_path / "p.png")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["loaded", "warm", "batch", "1", "2", "drawn"]
    assert (tmp_path / "p.png").exists()


def test_the_offline_example_generates_and_chats(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline.py", str(tiny_artifact)])
    runpy.run_path(str(ROOT / "examples" / "offline.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("'The capital of France is")
    assert lines[1].startswith("'2, 4, 8, 16,")
    assert len(lines) >= 3
