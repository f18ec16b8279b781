"""The parts of ``octavo bench`` that need no model: workloads, timelines, results, tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from octavo.bench import plot, report, roofline
from octavo.bench.results import (
    Decode,
    KernelTime,
    Machine,
    Model,
    Prefill,
    Profile,
    Results,
    Startup,
    StepGroup,
    Throughput,
    with_efficiency,
    write_results,
)
from octavo.bench.roofline import Roofline
from octavo.bench.suite import Plan
from octavo.bench.timeline import StepTime, Timeline
from octavo.bench.traffic import Traffic
from octavo.bench.workload import of_lengths, read_lengths
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import KVSlot
from octavo.runtime.kv_cache import KVFormat


def decode(batch_size: int, tokens_per_second: float) -> Decode:
    return Decode(
        engine="octavo",
        batch_size=batch_size,
        input_len=512,
        output_len=256,
        tokens_per_second=tokens_per_second,
        slowest=tokens_per_second - 1,
        fastest=tokens_per_second + 1,
        step_ms=4.0,
        first_token_ms=20.0,
        floor_ms=3.0,
        share=0.75,
    )


RESULTS = Results(
    machine=Machine("2026-11-30T12:00:00+00:00", "Linux", "A CPU", 4, "A GPU", {"torch": "9"}),
    model=Model(
        "tiny", "TinyForCausalLM", "cuda:sm_90", "bfloat16", None, "sha256:" + "a" * 64, 9, "dummy"
    ),
    command=["octavo", "bench", "a folder"],
    roofline=Roofline(4.4e12, 4.2e12, 8e14, "bfloat16"),
    decode=with_efficiency([decode(1, 250.0), decode(8, 1600.0)]),
    prefill=[Prefill(16, 2048, 42_000.4, 0.78, 0.6, 0.77)],
    throughput=[
        Throughput(
            "requests.json", 500, 1000, 2000, 4.0, 500.0, 750.0, 125.0,
            [StepGroup("prompts", 4, 1.0), StepGroup("decode, up to 8", 1500, 3.0)],
        )
    ],
    startup=[Startup({"import": 1.5, "load": 3.25})],
    profiles=[Profile(1, 640, "by the profiler", [KernelTime("a|b", 32, 100.0, 400_000_000, 0.9)])],
    failures=["Hugging Face: RuntimeError: no"],
)  # fmt: skip


def steps(*each: tuple[float, int, int, bool]) -> Timeline:
    return Timeline(2, [StepTime(*step) for step in each])


def test_decode_is_timed_between_the_last_prefill_and_the_first_end() -> None:
    line = steps(
        (1.0, 1, 0, True),
        (3.0, 3, 0, True),  # the second prompt, and a token of the first request beside it
        (3.5, 5, 0, False),
        (4.25, 7, 1, False),  # the first request ends with its token: this step still counts
        (9.0, 8, 2, False),
    )
    assert line.decode() == (2, 1.25)
    assert (line.prefill_seconds, line.first_token_seconds, line.seconds) == (3.0, 1.0, 9.0)
    assert line.num_tokens == 8


def test_steps_are_grouped_by_their_sequences() -> None:
    line = steps(
        (1.0, 1, 0, True),
        (2.0, 6, 0, False),  # five tokens
        (2.5, 14, 0, False),  # eight
        (4.0, 15, 0, True),
        (4.5, 24, 1, False),  # nine
        (4.75, 24, 2, False),  # none: a request ended without one
    )
    assert line.groups() == [
        StepGroup("prompts", 2, 2.5),
        StepGroup("decode, up to 8", 2, 1.5),
        StepGroup("decode, up to 16", 1, 0.5),
        StepGroup("decode, up to 1", 1, 0.25),
    ]


def test_outputs_that_end_with_the_prefill_have_no_decode() -> None:
    line = steps((1.0, 1, 1, True), (2.0, 2, 2, True))
    with pytest.raises(OctavoError, match=r"no step had all 2 requests decoding; .*--output-len"):
        line.decode()


def test_a_batch_that_does_not_run_at_once_is_refused() -> None:
    line = steps((1.0, 1, 0, True), (2.0, 2, 0, False), (3.0, 3, 1, False))
    with pytest.raises(OctavoError, match="did not all run at once"):
        line.decode()


def test_jobs_have_the_lengths_that_were_asked_for_and_ids_of_the_vocabulary() -> None:
    jobs = of_lengths([(3, 5), (4, 1)], 7)
    assert [(len(job.prompt), job.new_tokens) for job in jobs] == [(3, 5), (4, 1)]
    assert all(0 <= token < 7 for job in jobs for token in job.prompt)
    assert jobs == of_lengths([(3, 5), (4, 1)], 7)


def test_lengths_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[[3, 5], [4, 1]]")
    assert read_lengths(tmp_path / "r.json") == [(3, 5), (4, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is not JSON"),
        ("{}", "expected a list of"),
        ("[]", "expected a list of"),
        ("[[1, 2], [3]]", "entry 1"),
        ("[[0, 2]]", "entry 0"),
        ("[[1, 2.5]]", "entry 0"),
    ],
)
def test_other_lists_of_lengths_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(OctavoError, match=words):
        read_lengths(tmp_path / "r.json")


def test_traffic_counts_each_sequence_and_no_more_than_the_window() -> None:
    slots = (KVSlot(2, 16, 8), KVSlot(2, 16, 8, window=100))
    traffic = Traffic(1000, 300, 50, slots, kv_format=KVFormat(torch.bfloat16))
    assert traffic.kv_bytes(50) == 2 * 50 * 2 * 24 * 2
    assert traffic.kv_bytes(400) == (400 + 100) * 2 * 24 * 2
    assert traffic.decode_bytes(3, 50) == 1000 + 3 * 9600
    assert traffic.flops(num_tokens=10, num_rows=2) == 2 * (10 * 300 + 2 * 50)


def test_the_roofline_takes_the_longer_of_moving_and_computing() -> None:
    limits = Roofline(read_rate=100.0, copy_rate=200.0, matmul_rate=1000.0, dtype="float32")
    assert limits.seconds(num_bytes=400, flops=100) == 2.0
    assert limits.seconds(num_bytes=400, flops=5000) == 5.0


def test_the_roofline_of_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "_CPU_SIZE", 64)
    found = roofline.measure_roofline(torch.device("cpu"), torch.bfloat16)
    assert min(found.read_rate, found.copy_rate, found.matmul_rate) > 0
    assert found.dtype == "bfloat16"


def test_efficiency_is_against_the_smallest_batch() -> None:
    found = with_efficiency([decode(8, 1600.0), decode(2, 500.0)])
    assert [each.efficiency for each in found] == [0.8, 1.0]
    assert with_efficiency([]) == []


def test_a_plan_asks_for_room_for_its_longest_and_its_most() -> None:
    plan = Plan(batch_sizes=(1, 4), input_len=10, output_len=6, prefill=((8, 100),))
    sizes = {"max_model_len": 101, "max_num_seqs": 8, "skip_tokenizer_init": True}
    sizes["enable_prefix_caching"] = False
    assert plan.llm_options() == sizes
    plan = Plan(requests=((3, 4),) * 300, options={"max_num_seqs": 7})
    assert plan.llm_options() == {**sizes, "max_model_len": 7, "max_num_seqs": 7}
    assert Plan(requests=((3, 4),) * 600).llm_options()["max_num_seqs"] == 512


def test_results_are_read_as_they_were_written() -> None:
    assert Results.from_json(RESULTS.to_json()) == RESULTS
    assert json.loads(RESULTS.to_json())["schema"] == 1


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"schema": 2}', '{"schema": 1, "odd": 2}'])
def test_other_results_are_refused(text: str) -> None:
    with pytest.raises(OctavoError, match=r"r\.json holds no results .*octavo bench"):
        Results.from_json(text, "r.json")


def test_results_of_before_there_were_groups_of_steps_are_read() -> None:
    body = json.loads(RESULTS.to_json())
    del body["throughput"][0]["steps"], body["machine"]["python_rate"]
    read = Results.from_json(json.dumps(body))
    assert read.throughput[0].steps == []
    assert (read.machine.python_rate, read.decode) == (None, RESULTS.decode)


def test_tables_as_markdown() -> None:
    text = report.to_markdown(RESULTS)
    for line in (
        "### tiny (TinyForCausalLM), bfloat16, cuda:sm_90, dummy weights, sha256:aaaaaaaaaaaa",
        "A GPU, 4 CPUs; torch 9; 2026-11-30T12:00:00+00:00.  ",
        "    octavo bench 'a folder'",
        "| octavo | 8 | 512 + 256 | 1,600.0 | 1,599.0 to 1,601.0 | 4.000 | 75% | 80% | 20.0 |",
        "| 16 x 2048 | 42,000 | 77% |",
        "| 500 of requests.json | 500 | 750 | 125.0 | 4.00 |",
        "| 1.50 | 3.25 | 4.75 |",
        r"| a\|b | 32 | 100.0 | 400.0 | 90% |",
        "Not measured: Hugging Face: RuntimeError: no",
    ):
        assert line in text.splitlines()


def test_many_kernels_are_summed_up() -> None:
    kernels = [KernelTime(f"k{n}", 2, 10.0) for n in range(15)]
    results = dataclasses.replace(RESULTS, profiles=[Profile(1, 8, "how", kernels)])
    text = report.to_markdown(results)
    assert "| 3 others | 6 | 30.0 |  |  |" in text
    assert "| all | 30 | 150.0 |  |  |" in text


def test_tables_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "r.json"
    file.write_text(RESULTS.to_json())
    page.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    for _ in range(2):
        report.main([str(file), "--write", str(page)])
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n\n### tiny")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "stale" not in text
    assert text.count("### tiny") == 1


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "r.json"
    file.write_text(RESULTS.to_json())
    page.write_text("text")
    with pytest.raises(SystemExit, match=r"the marks .* are missing"):
        report.main([str(file), "--write", str(page)])
    assert page.read_text() == "text"


def test_the_page_of_figures_has_the_marks() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert 0 < page.read_text().index(report.BEGIN) < page.read_text().index(report.END)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(RESULTS, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match=r"pip install 'octavo\[bench\]'"):
        plot.require_matplotlib()


def test_results_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "one.json"
    write_results(RESULTS, path)
    before = path.read_text()
    assert Results.from_json(before) == RESULTS
    write_bytes = Path.write_bytes

    def half(self: Path, content: bytes) -> None:
        write_bytes(self, content[: len(content) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="the disk is full"):
        write_results(dataclasses.replace(RESULTS, command=["octavo"]), path)
    assert path.read_text() == before
    monkeypatch.undo()
    write_results(dataclasses.replace(RESULTS, command=["octavo"]), path)
    assert Results.from_json(path.read_text()).command == ["octavo"]
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]
