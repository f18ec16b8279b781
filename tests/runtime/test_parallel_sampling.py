"""Several samples of a prompt: each what it would be alone, all shown as one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo.runtime.engine import Engine
from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.test_llm import prompts
from tests.runtime.toy_artifact import PROGRAM, write_toy_artifact

PROMPT = prompts()[3]


def params(**more: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"n": 4, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(**{**defaults, **more})


def samples(llm: LLM, wanted: SamplingParams) -> list[CompletionOutput]:
    [output] = llm.generate([PROMPT], wanted)
    assert output.finished
    assert [each.index for each in output.outputs] == list(range(wanted.n))
    return output.outputs


def texts(outputs: list[CompletionOutput]) -> list[str]:
    return [output.text for output in outputs]


def test_a_seed_gives_different_samples_and_the_same_again(llm: LLM) -> None:
    first = samples(llm, params())
    assert len({tuple(each.token_ids) for each in first}) == 4
    assert samples(llm, params()) == first
    assert samples(llm, params(n=2)) == first[:2]
    assert samples(llm, params(n=1)) == first[:1]
    assert len({*texts(first), *texts(samples(llm, params(seed=8)))}) == 8


def test_without_a_seed_no_two_samples_are_the_same(llm: LLM) -> None:
    outputs = [*samples(llm, params(seed=None)), *samples(llm, params(seed=None))]
    assert len({tuple(each.token_ids) for each in outputs}) == 8


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_samples_are_the_same_in_any_company(shared_toy: Path, overlap: bool) -> None:
    alone = LLM(shared_toy)
    wanted = [params(n=1 + i % 4, seed=i, logprobs=i % 2 or None) for i in range(8)]
    expected = [alone.generate([p], q)[0] for p, q in zip(prompts(), wanted, strict=False)]
    tight = LLM(shared_toy, num_gpu_blocks_override=20, block_size=8, async_scheduling=overlap)
    outputs = tight.generate(prompts()[:8], wanted)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    preempted = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert sum(preempted) == tight.stats().num_preemptions > 0
    assert tight.stats().num_free_blocks == tight.stats().num_total_blocks


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_best_are_those_of_the_highest_log_probability(llm: LLM, logprobs: int | None) -> None:
    made = samples(llm, params(n=9, logprobs=logprobs or 0))
    assert all(each.cumulative_logprob is not None for each in made)
    best = sorted(made, key=lambda each: -(each.cumulative_logprob or 0.0))[:3]
    found = samples(llm, params(n=3, best_of=9, logprobs=logprobs))
    assert [each.token_ids for each in found] == [each.token_ids for each in best]
    assert [each.cumulative_logprob for each in found] == [each.cumulative_logprob for each in best]
    expected = [each.logprobs if logprobs is not None else None for each in best]
    assert [each.logprobs for each in found] == expected


def test_as_many_best_as_are_made_are_all_of_them(llm: LLM) -> None:
    assert samples(llm, params(best_of=4)) == samples(llm, params())


def run(engine: Engine, kind: OutputKind, wanted: SamplingParams) -> list[RequestOutput]:
    engine.add_request("a", PROMPT, wanted, kind=kind)
    outputs: list[RequestOutput] = []
    while engine.is_live("a"):
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"a"}
    assert not engine.has_unfinished_requests()
    return outputs


def test_every_kind_of_output_comes_to_the_same(llm: LLM) -> None:
    wanted = params(max_tokens=30, stop_token_ids=list(range(20)), logprobs=1)
    [final] = run(llm.engine, "final", wanted)
    lengths = [len(each.token_ids) for each in final.outputs]
    assert len(set(lengths)) > 1, "samples that end at different times, to be a test"
    *_, last = run(llm.engine, "cumulative", wanted)
    assert last.outputs == final.outputs
    joined = [CompletionOutput(i, "", [], 0.0, []) for i in range(4)]
    for output in run(llm.engine, "delta", wanted):
        for each in output.outputs:
            whole = joined[each.index]
            assert whole.finish_reason is None, "nothing comes after the end"
            whole.text += each.text
            whole.token_ids += each.token_ids
            assert whole.logprobs is not None
            assert each.logprobs is not None
            whole.logprobs += each.logprobs
            whole.cumulative_logprob = each.cumulative_logprob
            whole.finish_reason, whole.stop_reason = each.finish_reason, each.stop_reason
    assert joined == final.outputs


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_the_best_are_shown_at_the_end_only(llm: LLM, kind: OutputKind) -> None:
    [output] = run(llm.engine, kind, params(n=2, best_of=5))
    assert output.outputs == samples(llm, params(n=2, best_of=5))


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_an_abort_ends_all_samples(llm: LLM, kind: OutputKind) -> None:
    engine = llm.engine
    engine.add_request("a", PROMPT, params(), kind=kind)
    for _ in range(3):
        engine.step()
    output = engine.abort_request("a")
    assert output is not None
    assert output.finished
    assert [each.finish_reason for each in output.outputs] == ["abort"] * 4
    assert not engine.is_live("a")
    assert engine.abort_request("a") is None
    assert not engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    assert samples(llm, params()) == samples(llm, params())


def test_a_sample_that_fails_ends_alone_and_is_ranked_last(llm: LLM) -> None:
    expected = samples(llm, params(n=3, logprobs=0))
    unlucky = expected[1].token_ids[:2]

    def processor(output: list[int], logits: Tensor) -> Tensor:
        assert output != unlucky, "no luck"
        return logits

    found = samples(llm, params(n=3, logprobs=0, logits_processors=[processor]))
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert found[1].finish_reason == "error"
    assert "no luck" in str(found[1].stop_reason)
    ranked = samples(llm, params(n=2, best_of=3, logits_processors=[processor]))
    assert {each.text for each in ranked} == {expected[0].text, expected[2].text}


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_step_that_fails_ends_the_samples_in_it(tmp_path: Path, overlap: bool) -> None:
    broken = PROGRAM.replace(
        "        self.keys.flatten",
        "        assert 9 not in ids, 'luck'\n        self.keys.flatten",
    )
    write_toy_artifact(tmp_path / "a", program=broken)
    llm = LLM(tmp_path / "a", async_scheduling=overlap)
    with pytest.raises(EngineError, match="a step of 4 sequences"):
        llm.generate([[9]], params())
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    [output] = llm.generate([[1]], params(allowed_token_ids=[1, 2, 3]))
    assert len(output.outputs) == 4


def test_a_prompt_is_counted_once(llm: LLM) -> None:
    samples(llm, params())
    assert llm.last_stats.prompt_tokens == len(PROMPT)
    assert llm.last_stats.output_tokens == 4 * 12


def test_one_stream_is_one_text(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="stream gives one text, not n=2; use generate"):
        llm.stream("a", SamplingParams(n=2))


def test_more_are_wanted_than_made() -> None:
    with pytest.raises(InvalidRequest, match="best_of must be at least n=3, got 2"):
        SamplingParams(n=3, best_of=2)
