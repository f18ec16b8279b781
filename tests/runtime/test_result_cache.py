"""Equal requests computed once, against an engine that computes each of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.caching_engine import CachingEngine
from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.runtime.request_stream import join_outputs
from octavo.runtime.result_cache import ResultCache, is_deterministic, result_key
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.toy_artifact import PROGRAM, write_toy_artifact

KINDS: tuple[Any, ...] = ("cumulative", "delta", "final")
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
PROMPT = [5, 6, 7, 200, 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
# All that an output may hold: text that is held back, several samples, ranks, prompts, a grammar.
PARAMS = [
    GREEDY,
    replace(GREEDY, stop=["\x00\x00"], include_stop_str_in_output=True, prompt_logprobs=2),
    SamplingParams(seed=4, n=3, max_tokens=7, ignore_eos=True, logprobs=0, prompt_logprobs=0),
    SamplingParams(seed=4, n=2, best_of=4, max_tokens=5, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=9, min_tokens=3, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, structured_outputs={"choice": ["yes", "no"]}),
    SamplingParams(temperature=0.0, max_tokens=6, detokenize=False),
]


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"result_cache_size": 8, "check_invariants": True, **options})


def add(llm: LLM, name: str, params: SamplingParams, kind: Any = "final", **how: Any) -> None:
    llm.engine.add_request(name, PROMPT, params, kind=kind, **how)


def drain(llm: LLM) -> dict[str, list[RequestOutput]]:
    """Step until all is done; the outputs of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def joined(outputs: Sequence[RequestOutput], kind: Any) -> RequestOutput:
    """What a reader has in the end, put together as AsyncLLM does it for slow ones."""
    whole = outputs[0]
    for output in outputs[1:]:
        whole = join_outputs(whole, output, kind)
    return whole


def content(output: RequestOutput) -> tuple[Any, ...]:
    """All but who asked, when, and what it cost."""
    return (
        output.prompt,
        output.prompt_token_ids,
        output.outputs,
        output.finished,
        output.prompt_logprobs,
    )


def computed(folder: Path, params: SamplingParams) -> RequestOutput:
    return LLM(folder).generate([PROMPT], params, use_tqdm=False)[0]


def counts(llm: LLM) -> tuple[int, int, int]:
    stats = llm.stats()
    return stats.result_cache_hits, stats.result_cache_joined, stats.result_cache_misses


@OVERLAP
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_each_kind_has_its_outputs_at_once_late_and_after(
    shared_toy: Path, params: SamplingParams, overlap: bool
) -> None:
    expected = computed(shared_toy, params)
    llm = load(shared_toy, async_scheduling=overlap)
    for kind in KINDS:
        add(llm, f"{kind} first", params, kind)
    seen = [output for _ in range(3) for output in llm.engine.step()]
    for kind in KINDS:
        add(llm, f"{kind} late", params, kind)
    outputs = drain(llm)
    for output in reversed(seen):
        outputs.setdefault(output.request_id, []).insert(0, output)
    for kind in KINDS:
        add(llm, f"{kind} after", params, kind)
    num_steps = llm.stats().num_steps
    outputs |= drain(llm)
    assert llm.stats().num_steps == num_steps, "a stored answer took a step"
    assert len(outputs) == 9
    for name, each in outputs.items():
        kind = name.split()[0]
        assert content(joined(each, kind)) == content(expected), name
        assert [output.finished for output in each] == [False] * (len(each) - 1) + [True]
        if kind == "final":
            assert len(each) == 1
    assert sum(counts(llm)) == 9
    assert counts(llm)[2] == 1
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_outputs_of_each_step_are_those_of_a_request_alone(shared_toy: Path) -> None:
    for kind in KINDS:
        for params in PARAMS:
            plain = LLM(shared_toy)
            add(plain, "a", params, kind)
            expected = [content(each) for each in drain(plain)["a"]]
            llm = load(shared_toy)
            add(llm, "a", params, kind)
            add(llm, "b", params, kind)
            outputs = drain(llm)
            for name in "ab":
                assert [content(each) for each in outputs[name]] == expected


def test_one_is_computed_and_all_are_answered(shared_toy: Path) -> None:
    llm = load(shared_toy)
    outputs = llm.generate([PROMPT] * 20, GREEDY, use_tqdm=False)
    again = llm.generate([PROMPT] * 5, GREEDY, use_tqdm=False)
    assert counts(llm) == (5, 19, 1)
    assert llm.stats().output_tokens == 8
    assert [each.num_cached_tokens for each in outputs + again] == [0] + [5] * 24
    assert len({str(content(each)) for each in outputs + again}) == 1


def test_off_unless_asked_for(shared_toy: Path) -> None:
    llm = LLM(shared_toy)
    llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False)
    assert not isinstance(llm.engine, CachingEngine)
    assert counts(llm) == (0, 0, 0)
    assert llm.stats().output_tokens == 16


def test_what_differs_is_computed(shared_toy: Path) -> None:
    llm = load(shared_toy, result_cache_size=100)
    different: list[tuple[Any, SamplingParams]] = [
        (PROMPT, GREEDY),
        (PROMPT[:-1], GREEDY),
        (PROMPT, replace(GREEDY, max_tokens=7)),
        (PROMPT, replace(GREEDY, logprobs=None)),
        (PROMPT, replace(GREEDY, seed=1)),
        (PROMPT, replace(GREEDY, temperature=1.0, seed=1)),
        (PROMPT, replace(GREEDY, temperature=1.0, seed=2)),
        (PROMPT, replace(GREEDY, logit_bias={7: 1.0})),
        (PROMPT, replace(GREEDY, stop=["a"])),
        (PROMPT, replace(GREEDY, stop=["a", "b"])),
        ({"prompt_token_ids": PROMPT, "cache_salt": "one"}, GREEDY),
        ({"prompt_token_ids": PROMPT, "cache_salt": "two"}, GREEDY),
    ]
    for at_once in (True, False):
        prompts, params = [p for p, _ in different], [each for _, each in different]
        if at_once:
            llm.generate(prompts, params, use_tqdm=False)
        else:
            llm.reset_prefix_cache()
            for prompt, each in different:
                llm.generate([prompt], each, use_tqdm=False)
    assert counts(llm) == (0, 0, 2 * len(different))
    for prompt, each in different:
        llm.generate([prompt], each, use_tqdm=False)
    assert counts(llm) == (len(different), 0, 2 * len(different))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[lambda _, logits: logits]),
        SamplingParams(seed=3, max_tokens=4, logits_processors=[lambda _, logits: logits]),
    ],
    ids=["neither greedy nor seeded", "greedy with a processor", "seeded with a processor"],
)
def test_what_may_differ_is_never_shared(shared_toy: Path, params: SamplingParams) -> None:
    assert not is_deterministic(params)
    llm = load(shared_toy)
    for _ in range(2):
        llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert counts(llm) == (0, 0, 0)
    assert llm.stats().output_tokens == 16


def test_artifacts_have_keys_of_their_own() -> None:
    keys = {result_key(root, PROMPT, GREEDY) for root in (b"a", b"b")}
    assert len(keys) == 2


@OVERLAP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leaver", ["a", "b"])
def test_who_leaves_ends_nobody_else(
    shared_toy: Path, leaver: str, kind: Any, overlap: bool
) -> None:
    expected = computed(shared_toy, GREEDY)
    llm = load(shared_toy, async_scheduling=overlap)
    add(llm, "a", GREEDY, kind)
    add(llm, "b", GREEDY, kind)
    seen = [output for _ in range(3) for output in llm.engine.step()]
    last = llm.engine.abort_request(leaver)
    assert last is not None
    assert llm.engine.abort_request(leaver) is None
    mine = joined([*(o for o in seen if o.request_id == leaver), last], kind)
    [left] = mine.outputs
    [whole] = expected.outputs
    assert (left.finish_reason, mine.finished) == ("abort", True)
    assert left.token_ids == whole.token_ids[:3]
    assert left.logprobs == (whole.logprobs or [])[:3]
    assert not llm.engine.is_live(leaver)
    add(llm, leaver, replace(GREEDY, max_tokens=2))  # its id is free
    outputs = drain(llm)
    [stayed] = {"a", "b"} - {leaver}
    before = [output for output in seen if output.request_id == stayed]
    assert content(joined(before + outputs[stayed], kind)) == content(expected)
    assert outputs[leaver][-1].outputs[0].token_ids == whole.token_ids[:2]


@pytest.mark.parametrize("params", PARAMS[:4], ids=range(4))
@pytest.mark.parametrize("num_steps", [0, 2])
def test_the_last_who_leaves_ends_the_computation(
    shared_toy: Path, params: SamplingParams, num_steps: int
) -> None:
    llm = load(shared_toy)
    add(llm, "a", params, "cumulative")
    add(llm, "b", params, "cumulative")
    for _ in range(num_steps):
        llm.engine.step()
    for name in "ab":
        output = llm.engine.abort_request(name)
        assert output is not None
        assert output.finished
        assert [each.index for each in output.outputs] == list(range(params.n))
        assert {each.finish_reason for each in output.outputs} == {"abort"}
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    add(llm, "c", params)
    assert counts(llm) == (0, 1, 2)  # nothing of it was stored
    assert content(drain(llm)["c"][0]) == content(computed(shared_toy, params))


def test_a_stored_answer_may_be_aborted_before_it_is_given(shared_toy: Path) -> None:
    llm = load(shared_toy)
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    add(llm, "a", GREEDY)
    assert llm.engine.is_live("a")
    output = llm.engine.abort_request("a")
    assert output is not None
    assert output.finished
    assert not llm.engine.is_live("a")
    assert not llm.engine.has_unfinished_requests()


def test_what_a_user_changes_is_the_users_own(shared_toy: Path) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    expected = content(computed(shared_toy, params))
    llm = load(shared_toy)
    for kind in ("cumulative", "final", "final"):
        add(llm, "a", params, kind)
        add(llm, "b", params, "final")
        outputs: list[RequestOutput] = []
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                [completion] = output.outputs
                if output.request_id == "b":
                    outputs.append(output)
                    continue
                assert completion.logprobs is not None
                assert output.prompt_logprobs is not None
                for entry in [*completion.logprobs, *output.prompt_logprobs]:
                    (entry or {}).clear()
                completion.token_ids.clear()
                output.prompt_token_ids.clear()
        assert content(outputs[-1]) == expected


@OVERLAP
def test_a_step_that_fails_ends_all_and_leaves_nothing(
    shared_toy: Path, tmp_path: Path, overlap: bool
) -> None:
    """The second step of the program fails, once."""
    broken = PROGRAM.replace(
        "        self.keys.flatten(0, 1)[slot_mapping] = ids",
        "        self.count = getattr(self, 'count', 0) + 1\n"
        "        if self.count == 2:\n"
        "            raise RuntimeError('out of luck')\n"
        "        self.keys.flatten(0, 1)[slot_mapping] = ids",
    )
    write_toy_artifact(tmp_path / "a", program=broken)
    llm = load(tmp_path / "a", async_scheduling=overlap)
    with pytest.raises(EngineError, match="out of luck"):
        llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert counts(llm) == (0, 2, 2)
    assert content(output) == content(computed(shared_toy, GREEDY))


def test_an_error_is_told_to_all_and_not_stored(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(shared_toy)
    with monkeypatch.context() as patch:
        patch.setattr("octavo.runtime.output_processor.OutputProcessor.append", _fail)
        outputs = llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert counts(llm) == (0, 1, 2)


def _fail(*_: Any) -> None:
    raise EngineError("out of luck")


def test_time_limits_are_each_requests_own(shared_toy: Path) -> None:
    llm = load(shared_toy)
    add(llm, "late", GREEDY, deadline_ms=1e-6)
    add(llm, "patient", GREEDY)
    add(llm, "hurried", GREEDY, deadline_ms=60_000.0)
    add(llm, "impatient", GREEDY, queue_timeout_ms=60_000.0)
    add(llm, "also patient", GREEDY)
    outputs = drain(llm)
    reasons = {name: each[-1].outputs[0].finish_reason for name, each in outputs.items()}
    assert reasons.pop("late") == "deadline"
    assert set(reasons.values()) == {"length"}
    assert counts(llm) == (0, 1, 3)
    add(llm, "late", GREEDY, deadline_ms=1e-6)
    add(llm, "hurried", GREEDY, deadline_ms=60_000.0)
    outputs = drain(llm)
    assert outputs["late"][-1].outputs[0].finish_reason == "deadline"
    assert outputs["hurried"][-1].outputs[0].finish_reason == "length"
    assert counts(llm) == (1, 1, 3)
    stats = llm.stats()
    assert (stats.deadlines_met, stats.deadlines_missed) == (2, 2)


def test_the_more_urgent_do_not_wait_for_the_less_urgent(shared_toy: Path) -> None:
    llm = load(shared_toy, scheduling_policy="priority")
    for name, priority in (("a", 5), ("b", 6), ("c", 1), ("d", 2), ("e", 5)):
        add(llm, name, GREEDY, priority=priority)
    assert counts(llm) == (0, 3, 2)
    expected = content(computed(shared_toy, GREEDY))
    assert [content(each[-1]) for each in drain(llm).values()] == [expected] * 5
    plain = load(shared_toy)
    for _ in range(2):  # refused, whether or not there is an answer
        with pytest.raises(InvalidRequest, match="priority=1 means nothing"):
            add(plain, "a", GREEDY, priority=1)
        plain.generate([PROMPT], GREEDY, use_tqdm=False)


def test_stored_answers_do_not_keep_the_others_from_running(shared_toy: Path) -> None:
    llm = load(shared_toy)
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    add(llm, "long", replace(GREEDY, max_tokens=20))
    for number in range(2 * 20):
        add(llm, str(number), GREEDY)
        llm.engine.step()
        assert llm.engine.is_live(str(number)) is (number % 2 == 1), "answered without the program"
    assert not llm.engine.is_live("long")


def test_metrics_begin_with_the_arrival(shared_toy: Path) -> None:
    llm = load(shared_toy)
    add(llm, "a", GREEDY, "delta")
    for _ in range(3):
        llm.engine.step()
    add(llm, "b", GREEDY)
    outputs = drain(llm)
    add(llm, "c", GREEDY)
    outputs |= drain(llm)
    for name in "bc":
        times = outputs[name][-1].metrics
        assert isinstance(times, RequestMetrics)
        assert times.first_token_time is not None
        assert times.finished_time is not None
        assert times.arrival_time <= times.first_token_time <= times.finished_time
    before = outputs["a"][-1].metrics
    after = outputs["b"][-1].metrics
    assert before is not None
    assert after is not None
    assert before.arrival_time < after.arrival_time


def test_the_least_recently_used_is_given_up() -> None:
    def result(name: str) -> RequestOutput:
        return RequestOutput(name, None, [], [CompletionOutput(0, "", [])])

    cache = ResultCache(2)
    for name in ("a", "b"):
        cache.put(name.encode(), result(name))
    assert cache.get(b"a") is not None
    cache.put(b"c", result("c"))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    cache.put(b"a", result("newer"))
    assert len(cache) == 2
    found = cache.get(b"a")
    assert found is not None
    assert found.request_id == "newer"


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events(shared_toy: Path, seed: int) -> None:
    """Requests of few kinds come, go and are taken back at random; the books stay in order."""
    rng = random.Random(seed)
    expected = [computed(shared_toy, params) for params in PARAMS[:4]]
    llm = load(shared_toy, result_cache_size=2, async_scheduling=seed % 2 == 1, max_num_seqs=3)
    kinds: dict[str, tuple[int, Any]] = {}
    outputs: dict[str, list[RequestOutput]] = {}
    aborted: set[str] = set()
    for number in range(120):
        event = rng.random()
        live = [name for name in kinds if llm.engine.is_live(name)]
        if event < 0.35:
            name, which, kind = str(number), rng.randrange(4), rng.choice(KINDS)
            kinds[name] = which, kind
            add(llm, name, PARAMS[which], kind)
        elif event < 0.45 and live:
            name = rng.choice(live)
            aborted.add(name)
            assert llm.engine.abort_request(name) is not None
        elif event < 0.47:
            llm.reset_prefix_cache()
        else:
            for output in llm.engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        llm.engine.check()
    for name, each in drain(llm).items():
        outputs.setdefault(name, []).extend(each)
    for name, (which, kind) in kinds.items():
        if name not in aborted:
            assert content(joined(outputs[name], kind)) == content(expected[which])
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_through_async_llm(shared_toy: Path) -> None:
    expected = computed(shared_toy, GREEDY).outputs[0]

    async def text(engine: AsyncLLM) -> str:
        stream = engine.generate(PROMPT, GREEDY, output_kind="delta")
        return "".join([output.outputs[0].text async for output in stream])

    async def leave(engine: AsyncLLM) -> None:
        async with await engine.add_request(None, PROMPT, GREEDY):
            pass

    async def test() -> None:
        engine = AsyncLLM(shared_toy, result_cache_size=4)
        try:
            for _ in range(2):
                *texts, _ = await asyncio.gather(*(text(engine) for _ in range(9)), leave(engine))
                assert texts == [expected.text] * 9
            assert engine.stats().result_cache_hits >= 10
            while engine.num_requests:  # who left is taken out between two steps
                await asyncio.sleep(0.01)
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))
