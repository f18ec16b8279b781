"""The tuner on the CPU: kernels in PyTorch, a clock that says what the test wants."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from octavo.ir.manifest import KVSlot
from octavo.runtime import tune
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError
from octavo.runtime.module_calls import StepProgram, StepSize
from octavo.runtime.plan_files import write_plan
from octavo.runtime.plans import bind_plan, current_plan
from octavo.runtime.program_loader import import_program
from octavo.runtime.record_program import kernel_modules
from octavo.runtime.tune_steps import TunedStep
from tests.runtime.toy_artifact import write_manifest

PROGRAM = '''
import torch

from .kernels.src import double


class Program:
    """Two layers that double each token's position."""

    def __init__(self, weights, kv_caches, *, max_num_tokens, max_num_seqs):
        self.tables = [weights["a"], weights["b"]]

    def __call__(
        self, ids, positions, slot_mapping, block_table, query_start, seq_lens, logit_rows
    ):
        x = positions.float()[:, None] * torch.ones(64)
        for table in self.tables:
            x = double.run(x, table, out=torch.empty_like(x))
        return x[logit_rows]
'''

KERNEL = """
from octavo.runtime.kernel import Choices

CHOICES = Choices(
    (4, [dict(how="default"), dict(how="fast")]),
    (
        None,
        [
            dict(how="default"),
            dict(how="fast"),
            dict(how="wrong"),
            dict(how="lazy"),
            dict(how="broken"),
        ],
    ),
)
RAN = []


def run(x, table, *, out):
    how = CHOICES.for_rows(x.shape[0])["how"]
    RAN.append((how, x.shape[0], table.data_ptr()))
    if how == "broken":
        raise RuntimeError("it does not fit")
    out[:] = 2 * x
    if how == "wrong":
        out[3] += 0.01 * out[3]
    if how == "lazy":
        out[-1] = float("nan")
    return out
"""


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """Two calls of one module with two row buckets."""
    for name, text in (("program.py", PROGRAM), ("kernels/src/double.py", KERNEL)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "weights").mkdir()
    tables = {"a": torch.ones(8), "b": torch.ones(8)}
    save_file(tables, tmp_path / "weights" / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tables, "a.safetensors")}
    (tmp_path / "weights/index.json").write_text(json.dumps(index))
    write_manifest(tmp_path, target="cpu", kv_slots=(KVSlot(1, 64, 64),))
    return Artifact.open(tmp_path)


def modules_of(artifact: Artifact) -> list[ModuleType]:
    program = import_program(artifact.root, artifact.manifest)
    modules = tune.tunable(kernel_modules(program))
    bind_plan(None, modules)
    return modules


def tuned(
    artifact: Artifact, times: dict[str, float], *, deadline: float | None = None
) -> tuple[tune.TuneReport, ModuleType]:
    """Tune with a clock that knows how long each candidate takes."""
    modules = modules_of(artifact)
    [module] = modules
    sizes = [StepSize(4, 4, 32, is_even=False), StepSize(40, 2, 1)]

    def timer(body: Callable[[], None]) -> float:
        module.RAN.clear()
        body()
        assert len({table for *_, table in module.RAN}) == 2, "it rotates over the layers"
        return times[module.RAN[0][0]]

    step = StepProgram(artifact, torch.device("cpu"), sizes)
    report = tune.TuneReport(Path("plans/x.json"))
    end = time.monotonic() + 60 if deadline is None else deadline
    tune.Tuner(step, modules, timer).run(sizes, report, deadline=end)
    report.plan = current_plan(modules)
    return report, module


def test_the_fastest_candidate_is_chosen_for_each_bucket(artifact: Artifact) -> None:
    report, _ = tuned(artifact, {"default": 2.0, "fast": 1.0})
    assert report.plan == {"double": {"4": {"how": "fast"}, "*": {"how": "fast"}}}
    assert [(each.bucket, each.rows) for each in report.tuned] == [("4", 4), ("*", 40)]
    # Two calls in each body: the clock's time is shared out.
    assert [trial.seconds for trial in report.tuned[0].trials] == [1.0, 0.5]


def test_the_default_stays_unless_another_is_clearly_faster(artifact: Artifact) -> None:
    report, _ = tuned(artifact, {"default": 1.0, "fast": 0.995})
    assert report.plan == {"double": {"4": {"how": "default"}, "*": {"how": "default"}}}


def test_wrong_and_failing_candidates_are_reported_and_never_timed(artifact: Artifact) -> None:
    report, _ = tuned(artifact, {"default": 2.0, "fast": 1.0})
    problems = {t.candidate["how"]: t.problem for t in report.tuned[1].trials if t.problem}
    assert problems.keys() == {"wrong", "lazy", "broken"}
    assert "a row differs by 0.00" in (problems["wrong"] or "")
    assert "leaves out" in (problems["lazy"] or "")
    assert problems["broken"] == "it does not fit"


def test_what_is_fastest_alone_has_to_be_so_in_a_step(artifact: Artifact) -> None:
    """A clock by which a call alone is fast, and a whole step with it is slow."""
    modules = modules_of(artifact)
    [module] = modules
    sizes = [StepSize(4, 4, 32, is_even=False), StepSize(40, 2, 1)]
    step = StepProgram(artifact, torch.device("cpu"), sizes)
    whole = {"default": 3.0, "fast": 5.0}
    alone = {"default": 2.0, "fast": 1.8}
    is_step: list[bool] = []
    ready = step.ready

    def noting(size: StepSize) -> Callable[[], torch.Tensor]:
        run = ready(size)

        def noted() -> torch.Tensor:
            is_step.append(True)
            return run()

        return noted

    step.ready = noting  # type: ignore[method-assign]

    def timer(body: Callable[[], None]) -> float:
        module.RAN.clear()
        is_step.clear()
        body()
        return (whole if is_step else alone)[module.RAN[0][0]]

    report = tune.TuneReport(Path("plans/x.json"))
    tune.Tuner(step, modules, timer).run(sizes, report, deadline=time.monotonic() + 60)
    assert [each.chosen for each in report.tuned] == [{"how": "fast"}] * 2
    assert report.steps == [TunedStep(4, 3.0, 5.0, 3.0, ["double"])]
    assert current_plan(modules) == {"double": {"4": {"how": "default"}, "*": {"how": "fast"}}}


def test_a_time_that_is_up_leaves_the_rest_as_it_was(artifact: Artifact) -> None:
    report, _ = tuned(artifact, {}, deadline=time.monotonic() - 1)
    assert (report.tuned, report.num_skipped) == ([], 2)
    assert report.plan == {"double": {"4": {"how": "default"}, "*": {"how": "default"}}}


def test_a_candidate_that_fails_under_the_clock_is_passed_over(artifact: Artifact) -> None:
    report, _ = tuned(artifact, {"fast": 3.0})  # no time for the default: a KeyError
    assert report.tuned[0].trials[0].problem == "'default'"
    assert report.tuned[0].chosen == {"how": "fast"}


def test_choices_are_the_same_for_the_same_times() -> None:
    trials = [tune.Trial({"n": n}, seconds) for n, seconds in enumerate([2.0, 1.0, 1.0, None])]
    assert tune.choose(trials, {"n": 0}) == {"n": 1}
    assert tune.choose(trials, {"n": 2}) == {"n": 2}
    assert tune.choose([tune.Trial({"n": 0}, None, "broken")], {"n": 7}) == {"n": 7}


def test_steps_reach_the_largest_rows_of_each_bucket(artifact: Artifact) -> None:
    sizes = tune.step_sizes(modules_of(artifact))
    assert sizes == [StepSize(4, 4, 1024, is_even=False), StepSize(8192, 4, 1)]


def test_a_written_plan_is_found_and_leaves_the_content_id(artifact: Artifact) -> None:
    before = artifact.manifest.artifact_id
    plan = {"double": {"4": {"how": "fast"}, "*": {"how": "default"}}}
    for _ in range(2):  # a plan that is there is replaced
        write_plan(artifact, Path("plans/nvidia_h200.json"), plan)
    opened = Artifact.open(artifact.root)
    assert opened.manifest.artifact_id == before
    assert opened.manifest.files["plans/nvidia_h200.json"].role == "plan"
    modules = modules_of(opened)
    bind_plan(opened.file("plans/nvidia_h200.json"), modules)
    assert current_plan(modules) == plan


def test_decode_steps_end_at_the_context_and_do_not_share_blocks(artifact: Artifact) -> None:
    step = StepProgram(artifact, torch.device("cpu"), [StepSize(3, 3, 40)])
    ids, positions, slots, table, query_start, seq_lens, rows = step._inputs(StepSize(3, 3, 40))
    assert positions.tolist() == [39, 39, 39]
    assert seq_lens.tolist() == [40, 40, 40]
    assert table.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert slots.tolist() == [3 * 16 + 7, 6 * 16 + 7, 9 * 16 + 7]
    assert (query_start.tolist(), rows.tolist(), len(ids)) == ([0, 1, 2, 3], [0, 1, 2], 3)


def test_uneven_contexts_are_the_wanted_one_on_average(artifact: Artifact) -> None:
    size = StepSize(9, 9, 40, is_even=False)
    step = StepProgram(artifact, torch.device("cpu"), [size])
    *_, table, query_start, seq_lens, _ = step._inputs(size)
    assert sorted(seq_lens.tolist()) == [10, 17, 25, 32, 40, 47, 55, 62, 70]
    assert seq_lens.tolist() != sorted(seq_lens.tolist())
    assert len(table.unique()) == table.numel(), "sequences share blocks"
    assert query_start.tolist() == list(range(10))
    one = StepSize(1, 1, 40, is_even=False)
    assert one.contexts().tolist() == [40]


def test_prefill_steps_share_out_their_tokens(artifact: Artifact) -> None:
    size = StepSize(5, 2, 1)
    _, positions, slots, table, query_start, seq_lens, rows = StepProgram(
        artifact, torch.device("cpu"), [size]
    )._inputs(size)
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert table.tolist() == [[1], [2]]
    assert slots.tolist() == [16, 17, 18, 32, 33]
    assert (query_start.tolist(), seq_lens.tolist()) == ([0, 3, 5], [3, 2])
    assert rows.tolist() == [2, 4]


def test_an_artifact_of_another_target_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match=r"only Triton kernels are tuned, .* for cpu"):
        tune.tune_artifact(artifact.root)


def test_an_artifact_whose_id_covers_plans_is_refused(artifact: Artifact) -> None:
    write_manifest(artifact.root, target="cuda:sm_90", format=1)
    with pytest.raises(ArtifactError, match=r"of format 1 covers plans.*compile the model again"):
        tune.tune_artifact(artifact.root)
    assert not (artifact.root / "plans").exists()
