"""What a model says of its own prompt, however the prompt is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig
from tests.runtime.test_llm import PROGRAM, greedy, mix, mixed_params, prompts, shown
from tests.runtime.toy_artifact import VOCAB_SIZE, write_toy_artifact


def check(output: RequestOutput, num_top: int) -> None:
    """Against the model without a cache, position by position."""
    ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    for place in range(1, len(ids)):
        row = mix(ids[:place]).log_softmax(-1)
        entry = found[place]
        assert entry is not None
        assert set(entry) == {ids[place], *row.topk(num_top).indices.tolist()}
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
            assert logprob.rank == int((row > row[token_id]).sum()) + 1


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 33, "max_num_seqs": 40, "block_size": 5},
        {"num_gpu_blocks_override": 20, "block_size": 8},
    ],
    ids=str,
)
def test_they_are_the_models_however_it_is_run(
    shared_toy: Path, options: dict[str, Any], overlap: bool
) -> None:
    params = mixed_params(12)
    expected = shown(LLM(shared_toy).generate(prompts(), params))
    for i, each in enumerate(params):
        each.prompt_logprobs = (None, 0, 3)[i % 3]
    llm = LLM(shared_toy, async_scheduling=overlap, **options)
    outputs = llm.generate(prompts(), params)
    assert shown(outputs) == expected
    for output, each in zip(outputs, params, strict=True):
        if each.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, each.prompt_logprobs)
    stats = llm.stats()
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert stats.num_free_blocks == stats.num_total_blocks


def test_the_first_token_has_none(llm: LLM) -> None:
    params = SamplingParams(prompt_logprobs=1, temperature=0.0, max_tokens=3, ignore_eos=True)
    [output] = llm.generate([[9]], params)
    assert output.prompt_logprobs == [None]
    assert output.outputs[0].token_ids == greedy([9], 3)


def test_a_token_of_the_text_has_its_text(llm: LLM) -> None:
    [output] = llm.generate(["Hi"], SamplingParams(prompt_logprobs=0, max_tokens=1))
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    texts = [each.decoded_token for entry in entries for each in entry.values()]
    assert texts == ["H", "i"]


def test_the_whole_vocabulary_when_allowed(shared_toy: Path) -> None:
    llm = LLM(shared_toy, max_logprobs=-1)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(prompt_logprobs=-1, max_tokens=1))
    check(output, VOCAB_SIZE)


@pytest.mark.parametrize("wanted", [21, -1])
def test_more_than_allowed_is_refused(llm: LLM, wanted: int) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs={wanted} is beyond max_logprobs=20"):
        llm.generate([[1]], SamplingParams(prompt_logprobs=wanted))


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("n", [1, 3])
def test_every_kind_of_output_shows_them(llm: LLM, kind: OutputKind, n: int) -> None:
    """A stream of pieces once, with the first one; and once for all samples of the prompt."""
    params = SamplingParams(prompt_logprobs=2, n=n, seed=1, max_tokens=4, ignore_eos=True)
    llm.engine.add_request("a", prompts()[3], params, kind=kind)
    outputs: list[RequestOutput] = []
    while llm.engine.is_live("a"):
        outputs += llm.engine.step()
    having = [output for output in outputs if output.prompt_logprobs is not None]
    assert len(having) == (1 if kind == "delta" else len(outputs))
    check(having[0], 2)


def test_rows_of_an_ended_request_are_not_those_of_its_ids_next_owner(shared_toy: Path) -> None:
    llm = LLM(shared_toy, async_scheduling=True, max_num_seqs=8)
    params = SamplingParams(prompt_logprobs=0, max_tokens=3, ignore_eos=True)
    llm.engine.add_request("a", [3] * 40, params)
    llm.engine.step()  # a second step is running now
    llm.engine.abort_request("a")
    llm.engine.add_request("a", list(range(30)), params, kind="final")
    outputs: list[RequestOutput] = []
    while llm.engine.is_live("a"):
        outputs += llm.engine.step()
    check(outputs[-1], 0)


def test_logits_of_the_prompt_that_are_not_finite_end_the_request_alone(tmp_path: Path) -> None:
    spoiled = PROGRAM.replace(
        "return mix(tokens, self.salt)",
        "return mix(tokens, self.salt) + (float('nan') if tokens[-1] == 9 else 0)",
    )
    write_toy_artifact(tmp_path / "a", program=spoiled)
    llm = LLM(tmp_path / "a")
    params = SamplingParams(prompt_logprobs=0, temperature=0.0, max_tokens=2, ignore_eos=True)
    bad, good = llm.generate([[1, 9, 2], [1, 2]], params)
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].finish_reason == "length"
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    llm.generate([[*range(10, 50)]], params)
    num_cached = llm.stats().num_cached_blocks
    assert num_cached == 2
    llm.generate([[1, 9, *range(10, 50)]], params)
    assert llm.stats().num_cached_blocks == num_cached  # its blocks are not to be trusted


def request(name: str, length: int, prompt_logprobs: int | None) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs, max_tokens=8)
    return Request(name, range(length), params, max_model_len=100)


def run(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    plan = scheduler.schedule()
    scheduler.begin(plan)
    scheduler.update(plan, [7 for each in plan.sequences if each.is_sampled])
    for rows in plan.prompt_rows:
        rows.request.num_prompt_logprobs = rows.stop
    return (
        [(each.request.request_id, each.start, each.num_tokens) for each in plan.sequences],
        [(rows.request.request_id, rows.start, rows.stop) for rows in plan.prompt_rows],
    )


def test_a_step_has_no_more_rows_than_sequences() -> None:
    """Of four rows, one is kept for each that runs; what is left lengthens the chunk."""
    scheduler = Scheduler(SchedulerConfig(4, 100), BlockManager(50, 4))
    scheduler.add(request("a", 6, 1))
    scheduler.add(request("b", 3, None))
    assert run(scheduler) == ([("a", 0, 4)], [("a", 0, 4)])
    assert run(scheduler) == ([("a", 4, 2), ("b", 0, 3)], [("a", 4, 5)])
    assert run(scheduler) == ([("a", 6, 1), ("b", 3, 1)], [])
    scheduler.add(request("c", 5, 0))
    assert run(scheduler) == (
        [("a", 7, 1), ("b", 4, 1), ("c", 0, 2)],
        [("c", 0, 2)],
    )


def test_what_is_known_is_not_asked_again() -> None:
    """After a preemption in the middle of the prompt, which is then computed from its start."""
    scheduler = Scheduler(SchedulerConfig(4, 100), BlockManager(50, 4))
    again = request("a", 9, 1)
    again.num_prompt_logprobs = 3
    scheduler.add(again)
    assert run(scheduler) == ([("a", 0, 4)], [("a", 3, 4)])
    assert run(scheduler) == ([("a", 4, 4)], [("a", 4, 8)])
    assert run(scheduler) == ([("a", 8, 1)], [])
    known = request("b", 9, 1)
    known.num_prompt_logprobs = 8
    scheduler.add(known)
    assert run(scheduler) == ([("a", 9, 1), ("b", 0, 9)], [])
