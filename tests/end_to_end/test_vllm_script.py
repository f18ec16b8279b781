"""A script written for vLLM runs with its import changed, and nothing else."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

from octavo import LLM, SamplingParams
from tests.runtime.toy_artifact import BOS, EOS, VOCAB_SIZE, byte_tokenizer

# The shape of vLLM's own examples; `from vllm import ...` is the one line that is changed.
SCRIPT = """
import json, sys

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=7, max_tokens=12)


def main():
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        seed=0,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=16,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        enforce_eager=True,
        trust_remote_code=False,
        swap_space=4,
    )
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(json.dumps([prompt, generated_text]))

    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Once")
    [output] = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=3))
    print(json.dumps([output.prompt_token_ids, list(output.outputs[0].token_ids)]))

    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    [output] = llm.chat(conversation, sampling_params, use_tqdm=False)
    print(json.dumps([output.prompt, output.outputs[0].text]))


if __name__ == "__main__":
    main()
"""


def test_the_script(tiny_checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("from vllm import", "from octavo import"))
    runs = [run(script, tiny_checkpoint, tmp_path / "cache") for _ in range(2)]
    done = runs[0]
    assert done.returncode == 0, done.stderr
    *texts, from_ids, chat = [json.loads(line) for line in done.stdout.splitlines()]
    assert [prompt for prompt, _ in texts] == [
        "Hello, my name is",
        "The capital of France is",
        "The future of AI is",
    ]
    assert all(text for _, text in texts)
    assert from_ids[0] == [BOS, *byte_tokenizer().encode("Once", add_special_tokens=False).ids]
    assert len(from_ids[1]) == 3
    assert chat[0].endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    for name in ("trust_remote_code", "swap_space"):
        assert f"{name} has no effect: " in done.stderr
    assert runs[1].stdout == done.stdout, "equal seeds, other answers"
    artifacts = [path for path in (tmp_path / "cache").rglob("manifest.json")]
    assert len(artifacts) == 1, "the model was not compiled once"


def run(script: Path, model: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), str(model)],
        env={**os.environ, "OCTAVO_CACHE": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


# The shapes of what goes in and comes out.


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> LLM:
    return LLM(model=str(tiny_artifact))


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TEXT = "abc"
IDS = [BOS, *byte_tokenizer().encode(TEXT, add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (TEXT, TEXT),
        ([TEXT], TEXT),
        (IDS, None),
        ([IDS], None),
        ({"prompt": TEXT}, TEXT),
        ([{"prompt": TEXT}], TEXT),
        ({"prompt_token_ids": IDS}, None),
        ([{"prompt_token_ids": IDS}], None),
        ({"prompt_token_ids": IDS, "prompt": "said so"}, "said so"),
    ],
    ids=str,
)
def test_every_shape_of_a_prompt_gives_one_answer(llm: LLM, prompts: Any, text: str | None) -> None:
    [output] = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert (output.prompt, list(output.prompt_token_ids)) == (text, IDS)
    [expected] = llm.generate([IDS], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_prompts_of_several_shapes_at_once(llm: LLM) -> None:
    outputs = llm.generate([TEXT, IDS, {"prompt_token_ids": IDS}], GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_the_older_keyword_for_token_ids(llm: LLM) -> None:
    [output] = llm.generate(prompt_token_ids=[IDS], sampling_params=GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == IDS


def test_one_sampling_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


def test_no_sampling_params_mean_vllms_own(llm: LLM) -> None:
    [output] = llm.generate("a", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    assert output.outputs[0].logprobs is None


def test_the_fields_of_an_output(llm: LLM) -> None:
    [output] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert isinstance(output.request_id, str)
    assert output.finished
    [completion] = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (
        0,
        "length",
        None,
    )
    tokenizer = llm.get_tokenizer()
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert (completion.cumulative_logprob, completion.logprobs) == (None, None)
    assert completion.finished()


def test_the_structure_of_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, logprobs=3, seed=3)
    [output] = llm.generate(TEXT, params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 8
    total = 0.0
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert 3 <= len(entry) <= 4, "the three best, and the chosen one if it is none of them"
        best = sorted(entry.values(), key=lambda item: item.rank)
        assert [item.rank for item in best[:3]] == [1, 2, 3]
        values = [item.logprob for item in best]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert entry[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
        total += entry[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_all_logprobs_sum_to_one(tiny_artifact: Path) -> None:
    llm = LLM(model=str(tiny_artifact), max_logprobs=-1)
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1)
    [output] = llm.generate(TEXT, params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    for entry in output.outputs[0].logprobs:
        assert sorted(entry) == list(range(VOCAB_SIZE))
        assert sum(math.exp(item.logprob) for item in entry.values()) == pytest.approx(1.0)


def test_stops(llm: LLM) -> None:
    [plain] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    third = plain.outputs[0].token_ids[2]
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=[third], min_tokens=0
    )
    [stopped] = llm.generate(TEXT, params, use_tqdm=False)
    completion = stopped.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
    assert completion.token_ids[-1] == third
    assert completion.token_ids == plain.outputs[0].token_ids[: len(completion.token_ids)]


def test_the_models_own_end(tiny_artifact: Path) -> None:
    """A bias is not needed: of many seeds some draw the end of the text."""
    llm = LLM(model=str(tiny_artifact))
    params = [SamplingParams(temperature=2.0, max_tokens=200, seed=seed) for seed in range(16)]
    outputs = llm.generate([TEXT] * 16, params, use_tqdm=False)
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert (completion.stop_reason, completion.token_ids[-1]) == (None, EOS)
        assert "</s>" not in completion.text


# Keywords.

NOTICED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "trust_remote_code": True,
    "swap_space": 4,
    "disable_log_stats": True,
    "tokenizer_mode": "auto",
    "compilation_config": {"level": 3},
    "distributed_executor_backend": "mp",
}
SILENT: dict[str, Any] = {
    "gpu_memory_utilization": 0.5,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_model_len": 64,
    "dtype": "auto",
    "seed": 1,
    "quantization": None,
    "enable_prefix_caching": True,
    "kv_cache_dtype": "auto",
    "cpu_offload_gb": 0,
}


def test_keywords(tiny_artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(model=str(tiny_artifact), **NOTICED, **SILENT)
    notices = [record.getMessage() for record in caplog.records]
    assert sorted(notice.split()[0] for notice in notices) == sorted(NOTICED)
    assert all(" has no effect: " in notice for notice in notices)
