"""OpenAI's own client, unmodified, against ``octavo serve``: it must hear what LLM says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.runtime.llm import LLM
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.server.running_server import Process, in_process

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "Once upon a time, in a land far away"


@pytest.fixture(scope="module", params=["toy", pytest.param("smollm2", marks=pytest.mark.slow)])
def artifact(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue("shared_toy" if request.param == "toy" else request.param)
    return path


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Process]:
    with in_process(artifact, "--served-model-name", "m", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return LLM(artifact)


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def said(llm: LLM, prompt: Any = PROMPT, **parameters: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **parameters})
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def said_in_chat(llm: LLM, **parameters: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **parameters})
    return llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]


def complete(client: openai.OpenAI, **more: Any) -> Any:
    defaults = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    return client.completions.create(**{**defaults, **more})


def chat(client: openai.OpenAI, **more: Any) -> Any:
    defaults = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**{**defaults, **more})


def test_models(client: openai.OpenAI, llm: LLM) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("m", "model")
    assert model.model_extra["artifact_id"] == llm.artifact.manifest.artifact_id
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_a_completion_is_what_llm_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = said(llm)
    found = complete(client)
    [choice] = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    num_prompt_tokens = len(llm.get_tokenizer().encode(PROMPT))
    assert found.usage.prompt_tokens == num_prompt_tokens
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == num_prompt_tokens + len(expected.token_ids)
    assert found.object == "text_completion"
    assert found._request_id


def test_prompts_of_all_shapes(client: openai.OpenAI, llm: LLM) -> None:
    ids = [[5, 6, 7], [8, 9]]
    texts = ["One", "Two", "Three"]
    assert complete(client, prompt=ids[0]).choices[0].text == said(llm, ids[0]).text
    for prompts in (ids, texts):
        found = complete(client, prompt=prompts)
        assert [c.index for c in found.choices] == list(range(len(prompts)))
        assert [c.text for c in found.choices] == [said(llm, each).text for each in prompts]
        streamed = dict.fromkeys(range(len(prompts)), "")
        for chunk in complete(client, prompt=prompts, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert list(streamed.values()) == [c.text for c in found.choices]


@pytest.mark.parametrize("seed", range(4))
def test_stream_deltas_concatenate_to_the_whole(client: openai.OpenAI, llm: LLM, seed: int) -> None:
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 40}
    expected = said(llm, **sampling)
    chunks = list(complete(client, **sampling, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert complete(client, **sampling).choices[0].text == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_is_what_llm_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = said_in_chat(llm)
    found = chat(client)
    [choice] = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert found.object == "chat.completion"
    prompt_ids = llm.get_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert found.usage.prompt_tokens == len(prompt_ids)  # a doubled BOS would be one more


def test_a_chat_streams(client: openai.OpenAI, llm: LLM) -> None:
    expected = said_in_chat(llm)
    options = {"include_usage": True}
    chunks = list(chat(client, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert not any(chunk.usage for chunk in chat(client, stream=True))
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in chat(client, stream=True, stream_options=continuous)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == len(expected.token_ids)


def test_the_new_name_of_max_tokens(client: openai.OpenAI, llm: LLM) -> None:
    found = chat(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert found.choices[0].message.content == said_in_chat(llm, max_tokens=3).text


def test_completion_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    expected = said(llm, logprobs=3)
    whole = complete(client, logprobs=3).choices[0].logprobs
    assert whole.tokens == [
        entry[token].decoded_token
        for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    values = [e[t].logprob for t, e in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert whole.token_logprobs == pytest.approx(values, abs=1e-4)
    assert all(len(top) <= 3 for top in whole.top_logprobs)
    starts = [sum(map(len, whole.tokens[:at])) for at in range(len(whole.tokens))]
    assert whole.text_offset == starts
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in complete(client, logprobs=3, stream=True):
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert streamed["tokens"] == whole.tokens
    assert streamed["text_offset"] == whole.text_offset
    assert streamed["token_logprobs"] == pytest.approx(whole.token_logprobs, abs=1e-4)


def test_chat_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    expected = said_in_chat(llm, logprobs=2)
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    values = [e[t].logprob for t, e in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert [entry.logprob for entry in content] == pytest.approx(values, abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    best = [max(e.values(), key=lambda v: v.logprob).logprob for e in expected.logprobs]
    assert [entry.top_logprobs[0].logprob for entry in content] == pytest.approx(best, abs=1e-4)
    shown = content[:-1] if expected.finish_reason == "stop" else content
    joined = b"".join(bytes(entry.bytes) for entry in shown)
    assert joined.decode(errors="replace") == expected.text
    streamed = [
        entry.logprob
        for chunk in chat(client, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == pytest.approx(values, abs=1e-4)
    [plain] = chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content
    assert plain.top_logprobs == []


def test_stop_strings_cut_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    text = said(llm, max_tokens=40).text
    stop = text[9:12]
    expected = text[: text.index(stop)]
    found = complete(client, max_tokens=40, stop=[stop, "never said"]).choices[0]
    assert (found.text, found.finish_reason) == (expected, "stop")
    assert found.model_extra["stop_reason"] == stop
    chunks = list(complete(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    included = {"include_stop_str_in_output": True}
    kept = complete(client, max_tokens=40, stop=stop, extra_body=included).choices[0]
    assert kept.text == expected + stop


def test_echo(client: openai.OpenAI, llm: LLM) -> None:
    expected = PROMPT + said(llm).text
    assert complete(client, echo=True).choices[0].text == expected
    chunks = complete(client, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_echo_with_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    expected = said(llm, logprobs=1, prompt_logprobs=1, max_tokens=4)
    num_prompt_tokens = len(llm.get_tokenizer().encode(PROMPT))
    whole = complete(client, echo=True, logprobs=1, max_tokens=4).choices[0].logprobs
    assert whole.token_logprobs[0] is None
    assert len(whole.tokens) == num_prompt_tokens + 4
    values = [e[t].logprob for t, e in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert whole.token_logprobs[-4:] == pytest.approx(values, abs=1e-4)
    streamed: list[Any] = []
    for chunk in complete(client, echo=True, logprobs=1, max_tokens=4, stream=True):
        streamed += chunk.choices[0].logprobs.token_logprobs
    assert streamed[1:] == pytest.approx(whole.token_logprobs[1:], abs=1e-4)


def test_an_echoed_prompt_without_a_bos(client: openai.OpenAI, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("The cat sat", add_special_tokens=False)
    pieces = [tokenizer.decode([token_id]) for token_id in prompt]
    answer = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert answer.text.startswith("The cat sat")
    assert answer.logprobs.tokens[:-1] == pieces
    assert answer.logprobs.token_logprobs[0] is None
    starts = [sum(map(len, pieces[:at])) for at in range(len(pieces) + 1)]
    assert answer.logprobs.text_offset == starts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_prompt_alone(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    prompts = [PROMPT, "Two"]
    wanted = {"prompt": prompts, "echo": True, "max_tokens": 0, "logprobs": 2, "stream": stream}
    answer = complete(client, **wanted)
    chunks = list(answer) if stream else [answer]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    expected = llm.generate(prompts, params, use_tqdm=False)
    choices = {c.index: c for chunk in chunks for c in chunk.choices}
    assert sum(len(chunk.choices) for chunk in chunks) == 2
    for index, (prompt, output) in enumerate(zip(prompts, expected, strict=True)):
        choice = choices[index]
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        first, *others = choice.logprobs.token_logprobs
        assert first is None
        rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        assert others == pytest.approx([entry[i].logprob for i, entry in rest], abs=1e-4)
        # Tokens that are parts of characters share a text, by which the best are told here.
        tops = [{v.decoded_token for v in e.values()} for e in output.prompt_logprobs[1:]]
        shown = choice.logprobs.top_logprobs[1:]
        assert all(top.keys() <= texts for top, texts in zip(shown, tops, strict=True))
    if not stream:
        assert answer.usage.completion_tokens == 0
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in expected)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_prompt_tokens
    assert complete(client, echo=True, max_tokens=0).choices[0].logprobs is None


def check_prompt_logprobs(found: Any, output: RequestOutput, count: int) -> None:
    """That they are in vLLM's shape what LLM says, of which the best ``count`` are wanted."""
    assert found[0] is None
    assert output.prompt_logprobs is not None
    for mine, theirs in zip(found[1:], output.prompt_logprobs[1:], strict=True):
        assert theirs is not None
        wanted = {str(i): value for i, value in theirs.items()}
        assert mine.keys() == wanted.keys()
        assert count <= len(mine) <= count + 1
        for key, value in mine.items():
            assert set(value) == {"logprob", "rank", "decoded_token"}
            assert value["logprob"] == pytest.approx(wanted[key].logprob, abs=1e-4)
            assert value["rank"] == wanted[key].rank
            assert value["decoded_token"] == wanted[key].decoded_token


@pytest.mark.parametrize("more", [{}, {"echo": True, "logprobs": 4}], ids=["plain", "echo"])
def test_prompt_logprobs_of_completions(
    client: openai.OpenAI, llm: LLM, more: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    [expected] = llm.generate([PROMPT], params, use_tqdm=False)
    wanted = {"extra_body": {"prompt_logprobs": 1}, "max_tokens": 3, "n": 2}
    answer = complete(client, **wanted, **more)
    for choice in answer.choices:
        check_prompt_logprobs(choice.model_extra["prompt_logprobs"], expected, 1)
    if more:
        assert len(answer.choices[0].logprobs.tokens) == len(expected.prompt_token_ids) + 3


def test_prompt_logprobs_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    [expected] = llm.chat(MESSAGES, params, use_tqdm=False)
    answer = chat(client, extra_body={"prompt_logprobs": 2}, max_tokens=3)
    check_prompt_logprobs(answer.model_extra["prompt_logprobs"], expected, 2)
    assert "prompt_logprobs" not in chat(client, max_tokens=3).model_extra
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs cannot be streamed"):
        chat(client, extra_body={"prompt_logprobs": 2}, stream=True)


def test_truncated_prompts(client: openai.OpenAI, llm: LLM) -> None:
    cut = {"extra_body": {"truncate_prompt_tokens": 5}, "max_tokens": 4}
    ids = llm.get_tokenizer().encode(PROMPT)[-5:]
    found = complete(client, echo=True, **cut)
    assert (
        found.choices[0].text == llm.get_tokenizer().decode(ids) + said(llm, ids, max_tokens=4).text
    )
    assert found.usage.prompt_tokens == 5
    long = complete(client, prompt="a " * 20_000, **cut)
    assert long.usage.prompt_tokens == 5
    ids = llm.prepare_chat(MESSAGES).token_ids[-5:]
    answer = chat(client, **cut)
    assert answer.choices[0].message.content == said(llm, list(ids), max_tokens=4).text
    assert answer.usage.prompt_tokens == 5
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens must be at least 1"):
        chat(client, extra_body={"truncate_prompt_tokens": 0})


def test_a_seed_gives_the_same_again(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1, seed=s).choices[0].text for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_several_continuations(client: openai.OpenAI) -> None:
    sampling = {"n": 3, "temperature": 1, "seed": 7}
    found = complete(client, **sampling)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    texts = [choice.text for choice in found.choices]
    assert len(set(texts)) == 3
    streamed = dict.fromkeys(range(3), "")
    for chunk in complete(client, **sampling, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts
    found = complete(client, **{**sampling, "n": 2}, prompt=["a", "b"])
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    spoken = chat(client, **sampling)
    assert len({choice.message.content for choice in spoken.choices}) == 3


def test_an_answer_by_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": [41, 42]}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = chat(client, response_format=wanted, max_tokens=60, temperature=1, seed=1)
    value = json.loads(found.choices[0].message.content)
    assert set(value) == {"answer", "sure"}
    assert value["answer"] in (41, 42)
    assert isinstance(value["sure"], bool)
    tool = {"type": "function", "function": {"name": "reply", "parameters": schema}}
    named = {"type": "function", "function": {"name": "reply"}}
    for choice in ("required", named):
        more = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        found = chat(client, **more, max_tokens=200, temperature=1, seed=1)
        [call] = found.choices[0].message.tool_calls
        assert call.function.name == "reply"
        assert set(json.loads(call.function.arguments)) == {"answer", "sure"}


def test_many_at_once(server: Process, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        parameters: dict[str, Any] = {
            "model": "m",
            "prompt": f"{PROMPT} {index}",
            "temperature": 0,
            "max_tokens": 12,
        }
        if index % 2:
            return (await client.completions.create(**parameters)).choices[0].text
        stream = await client.completions.create(**parameters, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask(client, index) for index in range(24)))

    prompts = [f"{PROMPT} {index}" for index in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    expected = llm.generate(prompts, params, use_tqdm=False)
    assert asyncio.run(all_at_once()) == [output.outputs[0].text for output in expected]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [2**63]}, f"token id {2**63}"),
        ({"prompt": ["a", 5]}, "Invalid type for 'prompt': expected a string, an array"),
        ({"prompt": "a " * 20_000}, "leaves no room for an answer"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"top_p": 2}, "top_p"),
        ({"logprobs": 1000}, "max_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ({"extra_body": {"temprature": 1}}, "Unknown parameter: 'temprature'"),
        (
            {"extra_body": {"temperature": "hot"}},
            "type for 'temperature': expected a number",
        ),
        ({"extra_body": {"stop_token_ids": [10**6]}}, r"stop.token.id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_request(
    client: openai.OpenAI, parameters: dict[str, Any], words: str, stream: bool
) -> None:
    if stream and "stream_options" in parameters:
        pytest.skip("is right when streamed")
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        complete(client, **parameters, stream=stream)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert len(complete(client, max_tokens=2).choices) == 1


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 0"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema must be an object"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "--tool-call-parser"),
        ({"modalities": ["audio"]}, "Supported values are: 'text'"),
    ],
)
def test_a_bad_chat_request(client: openai.OpenAI, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        chat(client, **parameters)


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; there is 'm'"):
        complete(client, model="other")
