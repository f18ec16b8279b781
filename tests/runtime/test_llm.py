"""The whole of it over the toy model, whose tokens tell every fault of the cache."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.llm import LLM as CompilingLLM
from octavo.runtime.errors import ArtifactError, CapacityError, EngineError, InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.output_processor import OutputProcessor
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampler import SampledToken
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.toy_artifact import (
    BOS,
    EOS,
    IM_END,
    KERNEL,
    MAX_POSITION,
    PROGRAM,
    VOCAB_SIZE,
    write_manifest,
    write_toy_artifact,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])


def mix(tokens: list[int]) -> torch.Tensor:
    """The toy model without a cache."""
    scope: dict[str, Any] = {}
    exec(KERNEL, scope)
    logits: torch.Tensor = scope["mix"](torch.tensor(tokens), torch.zeros(VOCAB_SIZE))
    return logits


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mix(tokens).argmax()))
    return tokens[len(prompt) :]


def prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 90))] for _ in range(count)]


def mixed_params(count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5},
        {"seed": 6, "top_k": 20, "top_p": 0.9},
        {"seed": 7, "temperature": 1.5, "min_p": 0.01, "logprobs": 2},
    ]
    return [
        SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True, **kinds[i % 4]) for i in range(count)
    ]


def shown(outputs: list[RequestOutput]) -> list[Any]:
    completions = [output.outputs[0] for output in outputs]
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in completions]


def test_greedy_tokens_are_the_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for prompt, output in zip(prompts(), llm.generate(prompts(), params), strict=True):
        assert output.outputs[0].token_ids == greedy(prompt, 30)
        assert output.prompt_token_ids == prompt
        assert output.finished


@OVERLAP
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"long_prefill_token_threshold": 7},
        {"long_prefill_token_threshold": 64, "block_size": 1},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3, "block_size": 5},
        {"num_gpu_blocks_override": 20, "block_size": 8},
        {"num_gpu_blocks_override": 140, "block_size": 1, "long_prefill_token_threshold": 7},
    ],
    ids=str,
)
def test_the_same_answer_however_it_is_run(
    shared_toy: Path, options: dict[str, Any], overlap: bool
) -> None:
    params = mixed_params(12)
    alone = LLM(shared_toy)
    expected = [alone.generate([p], q)[0] for p, q in zip(prompts(), params, strict=True)]
    llm = LLM(shared_toy, async_scheduling=overlap, **options)
    assert shown(llm.generate(prompts(), params)) == shown(expected)
    stats = llm.stats()
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert stats.num_free_blocks == stats.num_total_blocks
    llm.engine.scheduler.blocks.check()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(0)``, ``work(1)`` and so on return, started at the same moment."""
    start = threading.Barrier(count)

    def run(index: int) -> Any:
        start.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_share_an_llm_get_the_answers_they_get_alone(llm: LLM) -> None:
    params = mixed_params(12)
    expected = [llm.generate([p], q)[0] for p, q in zip(prompts(), params, strict=True)]
    steps_alone = llm.stats().num_steps
    texts = [output.outputs[0].text for output in expected]

    def work(index: int) -> Any:
        mine = slice(3 * index, 3 * index + 3)
        outputs = llm.generate(prompts()[mine], params[mine], use_tqdm=False)
        return shown(outputs), "".join(llm.stream(prompts()[index], params[index]))

    results = in_threads(4, work)
    for index, (outputs, text) in enumerate(results):
        assert outputs == shown(expected[3 * index : 3 * index + 3])
        assert text == texts[index]
    # Their requests share steps: one thread does not wait until the one before it is done.
    assert llm.stats().num_steps < 1.25 * steps_alone
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_a_thread_gets_its_turn_before_another_is_done(llm: LLM) -> None:
    ended: list[str] = []
    running = threading.Event()

    def long() -> None:
        for _ in llm.stream([1], SamplingParams(seed=1, max_tokens=400, ignore_eos=True)):
            running.set()
        ended.append("long")

    thread = threading.Thread(target=long)
    thread.start()
    assert running.wait(30)
    llm.generate([[2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    ended.append("short")
    thread.join()
    assert ended == ["short", "long"]


@pytest.mark.timeout(30)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_may_be_collected_in_the_middle_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = shown(llm.generate([[1]], params))
    gc.collect()
    gc.freeze()  # or each collection looks through all that was ever imported
    cycle: list[Any] = [llm.stream([2], params)]
    cycle.append(cycle)
    stream = weakref.ref(cycle[0])
    next(cycle[0])
    del cycle
    real = OutputProcessor.append

    def append(self: OutputProcessor, sampled: SampledToken, now: float) -> None:
        gc.collect()
        assert stream() is None
        real(self, sampled, now)

    monkeypatch.setattr(OutputProcessor, "append", append)
    assert shown(llm.generate([[1]], params)) == expected
    assert not llm.engine.has_unfinished_requests()


def test_preemption_is_counted_with_the_request(shared_toy: Path) -> None:
    llm = LLM(shared_toy, num_gpu_blocks_override=20, block_size=8)
    outputs = llm.generate(prompts(), SamplingParams(max_tokens=40, ignore_eos=True))
    counts = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert sum(counts) == llm.stats().num_preemptions > 0


def test_a_seed_is_the_same_again_and_no_seed_is_not(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    first, second = (llm.generate([1, 2], params)[0].outputs[0].token_ids for _ in range(2))
    assert first == second
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = (llm.generate([1, 2], params)[0].outputs[0].token_ids for _ in range(2))
    assert first != second


def test_the_engines_seed_repeats_a_run(shared_toy: Path) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    runs = [LLM(shared_toy, seed=seed).generate([[1], [1]], params) for seed in (1, 1, 2)]
    assert shown(runs[0]) == shown(runs[1]) != shown(runs[2])
    assert runs[0][0].outputs[0].token_ids != runs[0][1].outputs[0].token_ids


def test_text_in_and_out(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [output] = llm.generate("Hi 你好", params)
    tokenizer = llm.get_tokenizer()
    assert output.prompt == "Hi 你好"
    assert output.prompt_token_ids == tokenizer.encode("Hi 你好")
    assert output.prompt_token_ids[0] == BOS
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, True)


def test_deprecated_keyword_of_vllm(llm: LLM) -> None:
    assert llm.generate(prompt_token_ids=[[1], [2, 3]])[1].prompt_token_ids == [2, 3]
    with pytest.raises(InvalidRequest, match="not both"):
        llm.generate("x", prompt_token_ids=[1])


def test_streamed_pieces_are_the_text(llm: LLM) -> None:
    for prompt in prompts(6):
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        [output] = llm.generate([prompt], params)
        assert "".join(llm.stream(prompt, params)) == output.outputs[0].text
    assert llm.last_stats.output_tokens == 50
    assert llm.last_stats.prompt_tokens == len(prompts(6)[-1])
    assert llm.last_stats.prefill_seconds > 0
    assert llm.last_stats.decode_seconds > 0


def test_streams_may_be_read_in_turns_and_left(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    expected = [llm.generate([p], params)[0].outputs[0].text for p in ([1], [2], [3])]
    first, second, third = (llm.stream(p, params) for p in ([1], [2], [3]))
    pieces = ["", ""]
    for _ in range(10):
        pieces[0] += next(first)
        pieces[1] += next(second)
        next(third)
    third.close()
    assert "".join([pieces[1], *second]) == expected[1]
    assert "".join([pieces[0], *first]) == expected[0]
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_chat_is_the_rendered_prompt_without_a_second_bos(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    [output] = llm.chat(chat, params)
    text = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert output.prompt_token_ids.count(BOS) == 1
    two = llm.chat([chat, chat], params)
    assert shown(two) == shown([output, output])
    assert "".join(llm.stream_chat(chat, params)) == output.outputs[0].text
    [plain] = llm.chat(chat, params, add_generation_prompt=False)
    assert plain.prompt == "<s><|im_start|>user\nHi<|im_end|>\n"
    [own] = llm.chat(chat, params, chat_template="{{ x }}", chat_template_kwargs={"x": "y"})
    assert own.prompt == "y"


def prompt_that_reaches(token: int, llm: LLM) -> tuple[list[int], int]:
    for start in range(256):
        tokens = greedy([start], 60)
        if token in tokens[3:] and token not in tokens[:3]:
            return [start], tokens.index(token)
    raise AssertionError("no such prompt")


def test_the_models_end_ends_it(llm: LLM) -> None:
    prompt, place = prompt_that_reaches(EOS, llm)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    [output] = llm.generate([prompt], params)
    assert output.outputs[0].token_ids[-1] == EOS
    assert len(output.outputs[0].token_ids) == place + 1
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    [on] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    assert len(on.outputs[0].token_ids) == 100


def test_the_end_comes_from_generation_config(tmp_path: Path) -> None:
    write_toy_artifact(tmp_path / "a", generation_config={"eos_token_id": [IM_END, 7]})
    llm = LLM(tmp_path / "a")
    prompt, place = prompt_that_reaches(7, llm)
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=100))
    assert len(output.outputs[0].token_ids) <= place + 1
    assert output.outputs[0].token_ids[-1] in (IM_END, 7)


def test_a_stop_token_ends_it_and_is_named(llm: LLM) -> None:
    prompt, place = prompt_that_reaches(65, llm)
    params = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=[65], ignore_eos=True)
    [output] = llm.generate([prompt], params)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 65)
    assert len(completion.token_ids) == place + 1
    tokenizer = llm.get_tokenizer()
    assert completion.text == tokenizer.decode(completion.token_ids[:-1], True)
    params.include_stop_str_in_output = True
    [output] = llm.generate([prompt], params)
    assert output.outputs[0].text == tokenizer.decode(completion.token_ids, True)


def test_min_tokens_bans_the_end_until_then(llm: LLM) -> None:
    prompt, place = prompt_that_reaches(EOS, llm)
    params = SamplingParams(temperature=0.0, max_tokens=100, min_tokens=place + 2)
    [output] = llm.generate([prompt], params)
    assert EOS not in output.outputs[0].token_ids[: place + 2]
    assert len(output.outputs[0].token_ids) >= place + 2


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_two_tokens(llm: LLM, include: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = llm.generate([[1]], params)[0].outputs[0].text
    stop = next(whole[i : i + 2] for i in range(5, 50) if "\ufffd" not in whole[i : i + 2])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        ignore_eos=True,
        stop=["never there", stop],
        include_stop_str_in_output=include,
    )
    [output] = llm.generate([[1]], params)
    end = whole.index(stop) + (len(stop) if include else 0)
    assert output.outputs[0].text == whole[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert "".join(llm.stream([1], params)) == whole[:end]


def test_logprobs_are_the_models(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=8, logprobs=2, ignore_eos=True)
    [output] = llm.generate([[1, 2, 3]], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    tokens, total = [1, 2, 3], 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        expected = mix(tokens).log_softmax(-1)
        best = expected.topk(2).indices.tolist()
        assert set(entry) == {token, *best}
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
            assert logprob.rank == int((expected > expected[token_id]).sum()) + 1
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
        total += expected[token].item()
        tokens.append(token)
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert llm.generate([[1]])[0].outputs[0].logprobs is None


@pytest.mark.parametrize(("length", "count"), [(MAX_POSITION - 1, 1), (MAX_POSITION - 3, 3)])
def test_the_models_maximum_ends_it(llm: LLM, length: int, count: int) -> None:
    [output] = llm.generate([[1] * length], SamplingParams(max_tokens=10, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == count
    assert output.outputs[0].finish_reason == "length"


def test_max_tokens_none_runs_to_the_maximum(shared_toy: Path) -> None:
    llm = LLM(shared_toy, max_model_len=40)
    [output] = llm.generate([[1] * 5], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 35


def test_a_bad_prompt_among_good_ones_runs_nothing(llm: LLM) -> None:
    bad: list[Any] = ["", [], [[1], [-1]], [[1], [VOCAB_SIZE]], [[1], [1] * MAX_POSITION], [1.5]]
    for prompt in bad:
        with pytest.raises(InvalidRequest):
            llm.generate(prompt)
    assert llm.stats().num_steps == 0
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate([[1]])) == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()] * 2, "2 sampling parameters for 1 prompts"),
        ([], "0 sampling parameters for 1 prompts"),
        ([None], "must be SamplingParams"),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids: token id 260 is not in"),
        (SamplingParams(stop_token_ids=[1, 2**63]), f"stop_token_ids: token id {2**63} is not in"),
        (SamplingParams(allowed_token_ids=[0, 260]), "allowed_token_ids: token id 260 is not in"),
        (SamplingParams(allowed_token_ids=[2**63]), f"allowed_token_ids: token id {2**63} is not"),
        (SamplingParams(logit_bias={260: 1.0}), "logit_bias: token id 260 is not in"),
        (SamplingParams(logit_bias={2**63: 1.0}), f"logit_bias: token id {2**63} is not in"),
        (SamplingParams(logprobs=21), "logprobs=21 is beyond max_logprobs=20"),
        (SamplingParams(logprobs=-1), "beyond max_logprobs"),
    ],
)
def test_parameters_that_do_not_suit_the_model(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([[1]], params)


def test_parameters_are_checked_again_when_used(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate([[1]], params)


def test_all_logprobs_when_allowed(shared_toy: Path) -> None:
    llm = LLM(shared_toy, max_logprobs=-1)
    [output] = llm.generate([[1]], SamplingParams(logprobs=-1, max_tokens=1))
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs[0]) == VOCAB_SIZE


def test_defaults_of_the_models_makers(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 77, "do_sample": True}
    rules = {"repetition_penalty": 1.1, "typical_p": 0.9}
    write_toy_artifact(tmp_path / "a", generation_config=config | rules)
    params = LLM(tmp_path / "a").get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_k=20, max_tokens=77, **rules)
    plain = LLM(tmp_path / "a", generation_config="vllm").get_default_sampling_params()
    assert plain == SamplingParams()


def test_what_the_makers_recommend_in_vain_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"repetition_penalty": -1.3, "temperature": "x", "top_k": -7, "top_p": 0.9}
    write_toy_artifact(tmp_path / "a", generation_config=config)
    params = LLM(tmp_path / "a").get_default_sampling_params()
    assert params == SamplingParams(top_p=0.9)
    for name, why in (
        ("repetition_penalty", "repetition_penalty must be above 0, got -1.3"),
        ("temperature", "temperature must be a number, got 'x'"),
        ("top_k", "top_k must be at least -1, got -7"),
    ):
        assert f"generation_config.json: {name} is left out: {why}" in caplog.text


def test_a_stream_without_text_is_refused(llm: LLM, shared_toy: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    silent = SamplingParams(detokenize=False)
    for call in (lambda: llm.stream("Hi", silent), lambda: llm.stream_chat(chat, silent)):
        with pytest.raises(InvalidRequest, match="detokenize=False asks for none"):
            call()
    with pytest.raises(InvalidRequest, match="stream gives text, which needs a tokenizer"):
        LLM(shared_toy, skip_tokenizer_init=True).stream([1, 2])


def test_the_seed_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()


@pytest.mark.parametrize("messages", [{"role": "user", "content": "Hi"}, None, 3, "Hi", [], ["Hi"]])
def test_a_chat_that_is_none(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"a conversation must|must be a dict"):
        llm.chat(messages)


@pytest.mark.parametrize(
    "variables",
    [
        *({"messages": []}, {"tools": None}, {"add_generation_prompt": False}),
        *({"continue_final_message": True}, {"chat_template": "x"}, {"self": 1}, 5),
    ],
    ids=str,
)
def test_variables_of_a_chat_template_that_are_taken(llm: LLM, variables: Any) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be a dict"):
        llm.chat([{"role": "user", "content": "Hi"}], chat_template_kwargs=variables)


@pytest.mark.parametrize("params", [5, {}, {"max_tokens": 3}, "greedy", [5]], ids=str)
def test_sampling_params_that_are_none(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams or a list"):
        llm.generate("a", params)


def test_without_a_tokenizer_ids_still_work(shared_toy: Path) -> None:
    llm = LLM(shared_toy, skip_tokenizer_init=True)
    [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=3, logprobs=1))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == ""
    for call in (
        lambda: llm.generate("Hi"),
        lambda: llm.chat([{"role": "user", "content": "Hi"}]),
        lambda: llm.generate([[1]], SamplingParams(stop="x")),
        lambda: llm.generate([[1]], SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            call()


def test_options_that_contradict_the_artifact(shared_toy: Path) -> None:
    with pytest.raises(InvalidRequest, match="compiled with dtype float32, not bfloat16"):
        LLM(shared_toy, dtype="bfloat16")
    with pytest.raises(InvalidRequest, match="quantization None, not awq; leave quantization"):
        LLM(shared_toy, quantization="awq")
    with pytest.raises(InvalidRequest, match="beyond the model's own maximum of 512"):
        LLM(shared_toy, max_model_len=513)
    with pytest.raises(CapacityError, match=r"raise num_gpu_blocks_override \(32 blocks would do"):
        LLM(shared_toy, max_model_len=512, num_gpu_blocks_override=10)
    with pytest.raises(CapacityError, match=r"kv_cache_memory_bytes \(10560 bytes would do"):
        LLM(shared_toy, max_model_len=512, kv_cache_memory_bytes=10559)
    LLM(shared_toy, max_model_len=512, num_gpu_blocks_override=32)
    LLM(shared_toy, max_model_len=512, kv_cache_memory_bytes=10560)
    with pytest.raises(ArtifactError, match="pinned"):
        LLM(shared_toy, artifact_id="sha256:00")


def test_a_small_pool_lowers_the_length_with_a_notice(
    shared_toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(shared_toy, num_gpu_blocks_override=4, swap_space=4)
    assert "swap_space has no effect" in caplog.text
    assert "max_model_len is lowered from the model's 512 to 65" in caplog.text
    assert "raise num_gpu_blocks_override for more" in caplog.text
    [output] = llm.generate([[1]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 64


def test_a_target_that_is_not_here(toy: Path) -> None:
    write_manifest(toy, target="cuda:sm_90")
    if not torch.cuda.is_available():
        with pytest.raises(ArtifactError, match="no usable NVIDIA GPU"):
            LLM(toy)
    write_manifest(toy, target="abacus")
    with pytest.raises(ArtifactError, match="'abacus' is not one"):
        LLM(toy)


@OVERLAP
def test_logits_that_are_not_finite_end_their_request_alone(tmp_path: Path, overlap: bool) -> None:
    spoiled = PROGRAM.replace(
        "return mix(tokens, self.salt)",
        "return mix(tokens, self.salt) + (float('nan') if tokens[0] == 9 else 0)",
    )
    write_toy_artifact(tmp_path / "a", program=spoiled)
    llm = LLM(tmp_path / "a", async_scheduling=overlap)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    good, bad = llm.generate([[1], [9]], params)
    assert good.outputs[0].token_ids == greedy([1], 5)
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.outputs[0].stop_reason)
    assert bad.outputs[0].token_ids == []
    with pytest.raises(EngineError, match="not finite"):
        list(llm.stream([9], params))


@OVERLAP
def test_a_step_that_fails_gives_everything_back(tmp_path: Path, overlap: bool) -> None:
    broken = PROGRAM.replace(
        "        self.keys.flatten",
        "        assert 9 not in ids, 'out of luck'\n        self.keys.flatten",
    )
    write_toy_artifact(tmp_path / "a", program=broken)
    llm = LLM(tmp_path / "a", async_scheduling=overlap)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with pytest.raises(EngineError, match=r"a step of 2 sequences and 2 tokens failed: .*luck"):
        llm.generate([[1], [9]], params)
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    assert llm.generate([[1]], params)[0].outputs[0].finish_reason == "length"


def test_a_fault_in_one_requests_text_ends_it_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    expected = shown(llm.generate([[1]], params))
    real = OutputProcessor.append

    def append(self: OutputProcessor, sampled: SampledToken, now: float) -> None:
        if self.request.token_ids[0] == 9:
            raise RuntimeError("no text")
        real(self, sampled, now)

    monkeypatch.setattr(OutputProcessor, "append", append)
    good, bad = llm.generate([[1], [9]], params)
    assert shown([good]) == expected
    assert bad.outputs[0].finish_reason == "error"
    assert "no text" in str(bad.outputs[0].stop_reason)
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_an_interrupted_call_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]])
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_unknown_keywords_are_type_errors(shared_toy: Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'block_size'"):
        LLM(shared_toy, blocksize=4)


@pytest.mark.parametrize("model", [None, 3, "", b"model", ["model"]])
def test_what_names_no_model(model: Any) -> None:
    for kind in (LLM, CompilingLLM):
        with pytest.raises(InvalidRequest, match="model must be the path of"):
            kind(model)


def test_a_path_that_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        LLM(tmp_path / "none")
    with pytest.raises(ArtifactError, match="is not an artifact"):
        LLM(tmp_path)
