"""The prefix cache through LLM, over the toy model, whose tokens tell every wrong block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime import load
from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.toy_artifact import PROGRAM, VOCAB_SIZE, write_toy_artifact

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
PREFIX = [(17 * i) % 251 for i in range(100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def shown(outputs: list[RequestOutput]) -> list[Any]:
    completions = [output.outputs[0] for output in outputs]
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in completions]


def related_prompts(count: int) -> list[list[int]]:
    """Prompts that begin alike for a while, some of them equal."""
    rng = random.Random(1)
    return [
        PREFIX[: rng.choice([0, 15, 16, 48, 64, 90])]
        + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 16, 30]))]
        or [1]
        for _ in range(count)
    ]


def params(count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 6, "top_k": 20, "logprobs": 2}]
    return [
        SamplingParams(max_tokens=4 + 3 * (i % 9), ignore_eos=True, **kinds[i % 2])
        for i in range(count)
    ]


@OVERLAP
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 5},
        {"long_prefill_token_threshold": 7, "block_size": 1},
        {"num_gpu_blocks_override": 20, "block_size": 8},
    ],
    ids=str,
)
def test_the_same_answers_with_and_without(
    shared_toy: Path, options: dict[str, Any], overlap: bool
) -> None:
    prompts, each = related_prompts(24), params(24)
    expected = LLM(shared_toy, enable_prefix_caching=False).generate(prompts, each)
    llm = LLM(shared_toy, async_scheduling=overlap, **options)
    assert shown(llm.generate(prompts, each)) == shown(expected)
    assert shown(llm.generate(prompts, each)) == shown(expected)
    stats = llm.stats()
    assert stats.prefix_cache_hits > stats.prefix_cache_queries / 4
    assert stats.num_free_blocks == stats.num_total_blocks
    llm.engine.scheduler.blocks.check()


@OVERLAP
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "block_size": 4},
        {"long_prefill_token_threshold": 7, "block_size": 8},
    ],
    ids=str,
)
def test_the_same_answers_with_blocks_in_host_memory(
    shared_toy: Path, options: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MIN_LOAD_TOKENS", 1)
    prompts, each = related_prompts(24), params(24)
    expected = LLM(shared_toy, enable_prefix_caching=False).generate(prompts, each)
    tight = {"num_gpu_blocks_override": 160 // options["block_size"]}
    llm = LLM(
        shared_toy,
        **{"async_scheduling": overlap, "max_model_len": 160, **tight, **options},
        kv_offload_gb=0.001,
        check_invariants=True,
    )
    for _ in range(2):
        assert shown(llm.generate(prompts, each)) == shown(expected)
    stats = llm.stats()
    assert stats.num_loaded_blocks > 0
    assert 0 < stats.host_cache_hits < stats.prefix_cache_hits
    assert 0 < stats.num_used_host_blocks <= stats.num_host_blocks
    llm.reset_prefix_cache()
    assert llm.stats().num_used_host_blocks == 0


def test_host_memory_needs_the_prefix_cache(shared_toy: Path) -> None:
    with pytest.raises(InvalidRequest, match="kv_offload_gb needs the prefix cache"):
        LLM(shared_toy, kv_offload_gb=1, enable_prefix_caching=False)


@OVERLAP
def test_64_that_share_a_prefix_compute_it_once(shared_toy: Path, overlap: bool) -> None:
    llm = LLM(shared_toy, async_scheduling=overlap, max_num_seqs=64)
    prompts = [[*PREFIX[:96], i] for i in range(64)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0] + [96] * 63
    stats = llm.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (64 * 97, 63 * 96)


def test_off_is_off(shared_toy: Path) -> None:
    llm = LLM(shared_toy, enable_prefix_caching=False)
    for _ in range(2):
        assert llm.generate([PREFIX], GREEDY)[0].num_cached_tokens == 0
    assert llm.stats().num_cached_blocks == 0


def test_salts_are_given_with_the_prompt(shared_toy: Path) -> None:
    llm = LLM(shared_toy)

    def hits(**prompt: Any) -> int | None:
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    assert hits(prompt_token_ids=PREFIX) == 0
    assert hits(prompt_token_ids=PREFIX, cache_salt="one") == 0
    assert hits(prompt_token_ids=PREFIX, cache_salt="two") == 0
    assert hits(prompt_token_ids=PREFIX, cache_salt="one") == 96
    assert hits(prompt_token_ids=PREFIX) == 96
    assert hits(prompt="x" * 100, cache_salt="one") == 0
    assert hits(prompt="x" * 100, cache_salt="one") == 96
    for salt in ("", 5):
        with pytest.raises(InvalidRequest, match="cache_salt must be a non-empty string"):
            hits(prompt_token_ids=PREFIX, cache_salt=salt)


def test_a_reset_forgets(shared_toy: Path) -> None:
    llm = LLM(shared_toy)
    llm.generate([PREFIX], GREEDY)
    assert llm.reset_prefix_cache()
    assert llm.generate([PREFIX], GREEDY)[0].num_cached_tokens == 0


@OVERLAP
def test_a_failed_step_leaves_nothing_in_the_cache(tmp_path: Path, overlap: bool) -> None:
    """The step writes rubbish and fails, the first time that it sees token 9."""
    broken = PROGRAM.replace(
        "        self.keys.flatten(0, 1)[slot_mapping] = ids",
        "        if 9 in ids and not hasattr(self, 'failed'):\n"
        "            self.failed = True\n"
        "            self.keys.flatten(0, 1)[slot_mapping] = 99.0\n"
        "            raise RuntimeError('out of luck')\n"
        "        self.keys.flatten(0, 1)[slot_mapping] = ids",
    )
    write_toy_artifact(tmp_path / "a", program=broken)
    options: dict[str, Any] = {"async_scheduling": overlap, "long_prefill_token_threshold": 40}
    llm = LLM(tmp_path / "a", **options)
    prompt = [*PREFIX[:40], 9, *PREFIX[40:90]]
    with pytest.raises(EngineError, match="out of luck"):
        llm.generate([prompt], GREEDY)
    again = llm.generate([prompt, PREFIX], GREEDY)
    # The chunk before was computed; where steps overlap, nobody has heard of that yet.
    assert again[0].num_cached_tokens == (0 if overlap else 32)
    expected = LLM(tmp_path / "a", enable_prefix_caching=False)
    with pytest.raises(EngineError, match="out of luck"):
        expected.generate([prompt], GREEDY)
    assert shown(again) == shown(expected.generate([prompt, PREFIX], GREEDY))


@OVERLAP
def test_a_request_that_went_wrong_is_not_found_again(tmp_path: Path, overlap: bool) -> None:
    spoiled = PROGRAM.replace(
        "return mix(tokens, self.salt)",
        "return mix(tokens, self.salt) + (float('nan') if len(tokens) == 102 else 0)",
    )
    write_toy_artifact(tmp_path / "a", program=spoiled)
    llm = LLM(tmp_path / "a", async_scheduling=overlap)
    for _ in range(2):
        output = llm.generate([PREFIX], GREEDY)[0]
        assert output.outputs[0].finish_reason == "error"
        assert output.num_cached_tokens == 0


def test_models_do_not_share(tmp_path: Path, shared_toy: Path) -> None:
    """Two artifacts differ in their content id, and with it in every key."""
    write_toy_artifact(tmp_path / "b", generation_config={"temperature": 0.5})
    keys = []
    for model in (shared_toy, tmp_path / "b"):
        engine = LLM(model).engine
        engine.add_request("x", PREFIX, GREEDY)
        keys.append(engine._live["x"].request.block_keys(6, 16))
    assert not set(keys[0]) & set(keys[1])
