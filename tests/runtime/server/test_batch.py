"""``octavo generate --input``: OpenAI's batch format, and going on after an interruption."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import OCTAVO, ROOT, Command, assert_refused, let_be_interrupted

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import EngineStats
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.app import ServerOptions
from octavo.runtime.server.batch_file import BatchRequest
from octavo.runtime.server.batch_run import run_batch
from tests.runtime.server.running_server import wait_until


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capfd, monkeypatch)


def line(custom_id: str, body: Any, url: str = "/v1/completions", **changes: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps({**request, **changes}) + "\n"


def completion(prompt: str | list[str], max_tokens: int = 5) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


def test_a_file_of_requests(here: Command, shared_toy: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"prompt {index}" for index in range(20)]
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "max_tokens": 5, "temperature": 0, "model": "toy"}
    source.write_text(
        "".join(line(f"r{index}", completion(prompt)) for index, prompt in enumerate(prompts))
        + "\n"
        + line("chat", chat, "/v1/chat/completions")
        + line("bad", {"prompt": ""})
        + line("odd", {"prompt": "a", "model": "other"})
    )
    done = here("generate", shared_toy, "--input", source, "--output", target)
    assert done.returncode == 0, done.stderr
    assert "23 lines answered, 2 with an error" in done.stderr
    found = answers(target)
    llm, params = LLM(shared_toy), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for index, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        assert found[f"r{index}"]["status_code"] == 200
        assert found[f"r{index}"]["body"]["choices"][0]["text"] == output.outputs[0].text
    [spoken] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    message = found["chat"]["body"]["choices"][0]["message"]
    assert message["content"] == spoken.outputs[0].text
    assert found["bad"]["status_code"] == 400
    assert "empty" in found["bad"]["body"]["error"]["message"]
    assert found["odd"]["status_code"] == 404
    before = target.read_bytes()
    again = here("generate", shared_toy, "--input", source, "--output", target)
    assert "23 lines are answered already" in again.stderr
    assert target.read_bytes() == before


def test_equal_lines_are_computed_once(
    here: Command, shared_toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"r{index}", completion("again")) for index in range(9)))
    stats: list[EngineStats] = []
    shutdown = AsyncLLM.shutdown
    monkeypatch.setattr(
        AsyncLLM, "shutdown", lambda engine: (stats.append(engine.stats()), shutdown(engine))[1]
    )
    files = ("--input", source, "--output", target)
    done = here("generate", shared_toy, *files, "--result-cache-size", "5")
    assert done.returncode == 0, done.stderr
    [each] = stats
    assert each.output_tokens == 5
    assert each.result_cache_misses == 1
    assert each.result_cache_hits + each.result_cache_joined == 8
    [output] = LLM(shared_toy).generate(
        ["again"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    texts = [each["body"]["choices"][0]["text"] for each in answers(target).values()]
    assert texts == [output.outputs[0].text] * 9


def test_going_on_after_an_interruption(shared_toy: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"r{i}", completion("a", 4 + 2 * i)) for i in range(100)))
    command = [*OCTAVO, "generate", shared_toy, "--input", source, "--output", target]
    options: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=let_be_interrupted, **options)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "octavo: interrupted\n"
    first = target.read_bytes()
    num_first = first.count(b"\n")
    assert 3 <= num_first < 100
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req-1", "custom_id": "r99", "resp')  # as a crash leaves it
    done = subprocess.run(command, check=True, **options)
    assert done.stderr == (
        f"octavo: {num_first} lines are answered already\n"
        f"octavo: {100 - num_first} lines answered, 0 with an error\n"
    )
    assert target.read_bytes().startswith(first)
    found = answers(target)
    assert len(found) == 100
    for index in range(100):
        usage = found[f"r{index}"]["body"]["usage"]
        assert usage["completion_tokens"] == 4 + 2 * index


def test_lines_of_more_prompts_than_there_is_room_for(shared_toy: Path, tmp_path: Path) -> None:
    requests = [
        BatchRequest(f"r{count}", "/v1/completions", completion(["a"] * count, 60))
        for count in (3, 4, 5, 2, 1)
    ]

    async def run() -> int:
        engine = AsyncLLM(shared_toy, max_num_seqs=2, max_queued_requests=2)
        options = ServerOptions(("toy",))
        try:
            return await run_batch(engine, options, requests, tmp_path / "out", lambda: None)
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == 1
    lines = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    codes = {each["custom_id"]: each["response"]["status_code"] for each in lines}
    assert codes == {"r1": 200, "r2": 200, "r3": 200, "r4": 200, "r5": 429}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["in.jsonl:2", "not JSON"]),
        ("[]", ["in.jsonl:2", "must be an object"]),
        (line("a", {"prompt": "a"}), ["in.jsonl:2", "'a' is there already"]),
        (line("", {}), ["custom_id"]),
        (line("b", {}, method="GET"), ["method"]),
        (line("b", {}, "/v1/embeddings"), ["url must be", "/v1/embeddings"]),
        (line("b", []), ["body must be an object"]),
        (line("b", {"stream": True}), ["streamed"]),
    ],
)
def test_a_line_that_is_no_request(
    here: Command, shared_toy: Path, tmp_path: Path, text: str, words: list[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", completion("a")) + text)
    assert_refused(here("generate", shared_toy, "--input", source, "--output", target), *words)
    assert not target.exists()


def test_files_that_make_no_sense(here: Command, shared_toy: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", completion("a")))
    target.write_text("some notes\n")
    files = ("--input", source, "--output", target)
    assert_refused(here("generate", shared_toy, *files), "out.jsonl:1", "not an answer")
    assert target.read_text() == "some notes\n"
    assert_refused(here("generate", shared_toy, "--input", source), "--output")
    both = ("--input", source, "--output", source)
    assert_refused(here("generate", shared_toy, *both), "overwrite")
    none = ("--input", tmp_path / "none", "--output", target)
    assert_refused(here("generate", shared_toy, *none), "none", "No such file")
    refused = here("generate", shared_toy, *files, "--temperature", "1")
    assert_refused(refused, "--temperature has no effect")
    assert_refused(here("generate", shared_toy), "nothing to continue", "--prompt")
    refused = here("generate", shared_toy, "-p", "a", "--result-cache-size", "1")
    assert_refused(refused, "--result-cache-size has no effect without --input")
