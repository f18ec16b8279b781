"""Prompts, sampling parameters and options that make no sense: one line, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_refused, octavo
from model_zoo import NUM_POSITIONS

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.toy_artifact import VOCAB_SIZE


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> LLM:
    return LLM(tiny_artifact)


def assert_invalid(call: Any, *words: str) -> None:
    """The call raises InvalidRequest, in one line with those words."""
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["the prompt is empty", "give at least one"]),
        ([], ["no prompt"]),
        ([[]], ["the prompt is empty", "give at least one"]),
        (["a", ""], ["prompt 1 is empty"]),
        ([5, -1], ["token id -1", f"0 to {VOCAB_SIZE - 1}"]),
        ([VOCAB_SIZE], [f"token id {VOCAB_SIZE}", f"0 to {VOCAB_SIZE - 1}"]),
        ([2**63], ["token id", f"0 to {VOCAB_SIZE - 1}"]),
        ([1.5], ["must be"]),
        ([True], ["must be"]),
        ({"prompt_token_ids": [3, -7]}, ["token id -7"]),
        ({"prompt_token_ids": "abc"}, ["token ids must be a list"]),
        ({"prompt": 7}, ["neither a prompt string nor prompt_token_ids"]),
        ({"multi_modal_data": {}, "prompt": "a"}, ["multi_modal_data"]),
        ("\ud800", ["not valid Unicode"]),
        (7, ["must be"]),
        (None, ["must be"]),
    ],
)
def test_a_prompt(llm: LLM, prompt: Any, words: list[str]) -> None:
    assert_invalid(lambda: llm.generate(prompt, SamplingParams(), use_tqdm=False), *words)
    assert llm.stats().num_waiting == llm.stats().num_running == 0


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_a_prompt_longer_than_the_model_allows(llm: LLM, excess: int) -> None:
    prompt = [7] * (NUM_POSITIONS + excess)
    words = (f"has {len(prompt)} tokens", f"max_model_len={NUM_POSITIONS}", "shorten it")
    assert_invalid(lambda: llm.generate([prompt], use_tqdm=False), *words)


def test_the_longest_prompt_that_fits_gets_its_one_token(llm: LLM) -> None:
    [output] = llm.generate([[7] * (NUM_POSITIONS - 1)], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": -1.0}, ["temperature", "at least 0", "-1"]),
        ({"temperature": float("nan")}, ["temperature", "finite", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "finite", "inf"]),
        ({"temperature": "hot"}, ["temperature", "number", "'hot'"]),
        ({"top_p": 0.0}, ["top_p", "above 0"]),
        ({"top_p": 2.0}, ["top_p", "at most 1", "2"]),
        ({"top_p": float("nan")}, ["top_p", "finite"]),
        ({"top_k": -2}, ["top_k", "at least -1"]),
        ({"top_k": 1.5}, ["top_k", "integer"]),
        ({"min_p": 1.5}, ["min_p", "at most 1"]),
        ({"max_tokens": 0}, ["max_tokens", "at least 1", "0"]),
        ({"max_tokens": 2.5}, ["max_tokens", "integer"]),
        ({"max_tokens": 4, "min_tokens": 5}, ["min_tokens", "max_tokens=4", "5"]),
        ({"min_tokens": -1}, ["min_tokens", "at least 0"]),
        ({"stop": 7}, ["stop", "string", "7"]),
        ({"stop": [""]}, ["stop", "empty"]),
        ({"stop": ["a", 1]}, ["stop", "list of strings"]),
        ({"stop_token_ids": "7"}, ["stop_token_ids", "list of integers"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "at least 0"]),
        ({"seed": 0.5}, ["seed", "integer"]),
        ({"seed": 2**64}, ["seed", "at most"]),
        ({"logprobs": -2}, ["logprobs", "at least -1"]),
        ({"n": 0}, ["n", "at least 1"]),
        ({"n": 3, "best_of": 2}, ["best_of", "at least n=3", "got 2"]),
        ({"ignore_eos": "yes"}, ["ignore_eos", "True or False"]),
    ],
    ids=str,
)
def test_sampling_parameters(parameters: dict[str, Any], words: list[str]) -> None:
    assert_invalid(lambda: SamplingParams(**parameters), *words)


def test_sampling_parameters_set_after_they_were_made(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    assert_invalid(lambda: llm.generate("a", params, use_tqdm=False), "temperature", "at least 0")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([SamplingParams()] * 3, ["3 sampling parameters for 2 prompts", "one each"]),
        ({"temperature": 0}, ["must be SamplingParams or a list", "{'temperature': 0}"]),
        (["greedy", "greedy"], ["must be SamplingParams", "'greedy'"]),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), ["stop_token_ids", f"token id {VOCAB_SIZE}"]),
        (SamplingParams(logprobs=21), ["logprobs=21", "max_logprobs=20"]),
    ],
)
def test_sampling_parameters_that_do_not_fit(llm: LLM, params: Any, words: list[str]) -> None:
    assert_invalid(lambda: llm.generate(["a", "b"], params, use_tqdm=False), *words)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "not supported", "use 1"]),
        ({"dtype": "int3"}, ["dtype", "float32", "int3"]),
        ({"dtype": "bfloat16"}, ["dtype float32", "not bfloat16", "compile the model again"]),
        ({"quantization": "awq"}, ["quantization", "awq"]),
        ({"max_model_len": 1}, ["max_model_len", "at least 2"]),
        ({"max_model_len": NUM_POSITIONS + 1}, ["max_model_len", str(NUM_POSITIONS)]),
        ({"block_size": 0}, ["block_size", "at least 1"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "at least 1"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "above 0"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "at most 1"]),
        ({"seed": "one"}, ["seed", "integer"]),
        ({"speculative_config": {"num_speculative_tokens": 3}}, ["speculative_config"]),
    ],
    ids=str,
)
def test_keywords_of_llm(tiny_artifact: Path, keywords: dict[str, Any], words: list[str]) -> None:
    assert_invalid(lambda: LLM(tiny_artifact, **keywords), *words)


def test_an_unknown_keyword_of_llm(tiny_artifact: Path) -> None:
    with pytest.raises(TypeError, match=r"'max_model_length'; did you mean 'max_model_len'\?"):
        LLM(tiny_artifact, max_model_length=64)


def test_a_pool_that_holds_no_request(tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact, num_gpu_blocks_override=2, block_size=4)
    prompt = [7] * 20
    assert_invalid(lambda: llm.generate([prompt], use_tqdm=False), "20 tokens")


# Through the command.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "x" * 300], [" tokens, which leaves no room for an answer", "shorten it"]),
        (["-p", "a", "--temperature", "-1"], ["temperature", "at least 0"]),
        (["-p", "a", "--temperature", "nan"], ["temperature", "finite"]),
        (["-p", "a", "--temperature", "hot"], ["--temperature", "valid number", "--help"]),
        (["-p", "a", "--top-p", "0"], ["top_p", "above 0"]),
        (["-p", "a", "--top-p", "2"], ["top_p", "at most 1"]),
        (["-p", "a", "--top-k", "-2"], ["top_k", "at least -1"]),
        (["-p", "a", "--min-p", "-0.5"], ["min_p", "at least 0"]),
        (["-p", "a", "--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["-p", "a", "--stop", ""], ["stop", "empty"]),
        (["-p", "a", "--seed", "99999999999999999999999"], ["seed", "at most"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command(
    octavo_here: Command,
    tiny_artifact: Path,
    command: str,
    options: list[str],
    words: list[str],
) -> None:
    assert_refused(octavo_here(command, tiny_artifact, *options), *words)


def test_the_command_in_a_process_of_its_own(tiny_artifact: Path) -> None:
    assert_refused(octavo("generate", tiny_artifact, "-p", "a", "--top-p", "2"), "top_p")
    assert_refused(octavo("generate", tiny_artifact, "-p", ""), "the prompt is empty")
