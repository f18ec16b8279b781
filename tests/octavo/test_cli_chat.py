"""``octavo chat`` and ``octavo generate`` over a model that repeats what it was told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import chat
from octavo.cli.main import app
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import FileEntry, Manifest
from octavo.runtime.sampling_params import SamplingParams


class EchoLLM:
    """Answers with its messages; on ``fail`` it fails half-way, on ``stop me`` Ctrl-C comes."""

    def __init__(self, path: Path) -> None:
        self.last_stats: SimpleNamespace | None = None

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[str]:
        yield "I heard: "
        if messages[-1]["content"] == "fail":
            raise OctavoError("too long")
        if messages[-1]["content"] == "stop me":
            raise KeyboardInterrupt
        yield " | ".join(f"{message['role']} {message['content']}" for message in messages)
        self.last_stats = SimpleNamespace(
            prompt_tokens=20, output_tokens=11, prefill_seconds=0.5, decode_seconds=2.0
        )

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        texts = [f"{prompt} {params.max_tokens} {params.temperature}" for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("octavo.runtime.llm")
    module.LLM = EchoLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.runtime.llm", module)
    write_manifest(tmp_path, files=["model/tokenizer.json"])
    return str(tmp_path)


def write_manifest(folder: Path, files: list[str]) -> None:
    manifest = Manifest(
        architecture="Echo",
        model_type="echo",
        target="cpu",
        dtype="f32",
        vocab_size=100,
        max_position=64,
        kv_slots=(),
        files={name: FileEntry(1, "0" * 64, "model") for name in files},
    )
    (folder / "manifest.json").write_text(manifest.to_json())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a terminal, for what asks."""
    monkeypatch.setattr(chat, "_is_terminal", lambda: True)


def run(*arguments: str, typed: str = "") -> Result:
    result = CliRunner().invoke(app, list(arguments), input=typed)
    assert result.exit_code == 0, result.exception
    return result


def test_one_prompt_is_answered_with_the_system_prompt_before_it(artifact: str) -> None:
    result = run("chat", artifact, "-p", "hello", "--system", "be kind")
    assert result.stdout == "I heard: system be kind | user hello\n"
    assert result.stderr == ""


def test_stats_count_decode_steps_without_the_first_token(artifact: str) -> None:
    assert run("chat", artifact, "-p", "hello", "--stats").stderr == (
        "prefill: 20 tokens in 0.50 s, 40.0 tokens/s; decode: 11 tokens in 2.00 s, 5.0 tokens/s\n"
    )


def test_a_conversation_remembers_its_turns_and_skips_empty_lines(artifact: str) -> None:
    result = run("chat", artifact, typed="one\n\ntwo\n")
    assert "I heard: user one | assistant I heard: user one | user two\n" in result.stdout


def test_a_turn_that_fails_is_told_and_forgotten(artifact: str) -> None:
    result = run("chat", artifact, typed="one\nfail\nthree\n")
    assert result.stderr == "octavo: error: too long\n"
    assert result.stdout.endswith("I heard: user one | assistant I heard: user one | user three\n")


def test_a_pipe_sees_answers_only(artifact: str) -> None:
    assert run("chat", artifact, typed="one\n").stdout == "I heard: user one\n"


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_ends_the_answer_and_what_was_said_is_remembered(artifact: str) -> None:
    result = run("chat", artifact, typed="stop me\ntwo\n")
    assert result.stderr == "octavo: interrupted\n"
    assert result.stdout == (
        "> I heard: \n> I heard: user stop me | assistant I heard:  | user two\n> \n"
    )


@pytest.mark.parametrize(("arguments", "typed"), [(["-p", "stop me"], ""), ([], "stop me\ntwo\n")])
def test_ctrl_c_ends_a_chat_that_nobody_types(
    artifact: str, arguments: list[str], typed: str
) -> None:
    result = CliRunner().invoke(app, ["chat", artifact, *arguments], input=typed)
    assert result.exit_code == 130
    assert result.stdout == "I heard: \n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_artifact_without_a_tokenizer_is_refused(artifact: str, command: str) -> None:
    write_manifest(Path(artifact), files=[])
    result = CliRunner().invoke(app, [command, artifact, "-p", "a"])
    assert isinstance(result.exception, OctavoError)
    assert "has no tokenizer, and the command line takes text only" in str(result.exception)


def test_an_empty_prompt_is_refused(artifact: str) -> None:
    result = CliRunner().invoke(app, ["chat", artifact, "-p", ""])
    assert isinstance(result.exception, OctavoError)
    assert str(result.exception) == "the prompt is empty; give at least one character"


def test_one_prompt_prints_only_the_new_text(artifact: str) -> None:
    result = run("generate", artifact, "-p", "a", "--max-tokens", "7")
    assert result.stdout == "a 7 0.0\n"


def test_many_prompts_are_numbered(artifact: str) -> None:
    result = run("generate", artifact, "-p", "a", "-p", "b\nc", "--temperature", "0.5")
    assert result.stdout == "--- 1: a\na 256 0.5\n--- 2: b c\nb\nc 256 0.5\n"


def test_impossible_sampling_parameters_are_refused_before_the_model_is_loaded(
    artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["octavo.runtime.llm"], "LLM")
    result = CliRunner().invoke(app, ["generate", artifact, "-p", "a", "--top-p", "1.5"])
    assert isinstance(result.exception, OctavoError)
    assert "top_p" in str(result.exception)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_every_option_of_sampling_reaches_the_model(
    artifact: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    seen: list[SamplingParams] = []

    def chat_with(self: EchoLLM, messages: Any, params: SamplingParams) -> Iterator[str]:
        seen.append(params)
        yield ""

    def generate(self: EchoLLM, prompts: Any, params: SamplingParams, use_tqdm: bool) -> list[Any]:
        seen.append(params)
        return [SimpleNamespace(outputs=[SimpleNamespace(text="")])]

    monkeypatch.setattr(EchoLLM, "stream_chat", chat_with)
    monkeypatch.setattr(EchoLLM, "generate", generate)
    options = (
        "--max-tokens 7 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 "
        "--repetition-penalty 1.5 --presence-penalty 0.75 --frequency-penalty -1 --seed 9 "
        "--stop a --stop b --ignore-eos"
    )
    run(command, artifact, "-p", "hello", *options.split())
    run(command, artifact, "-p", "hello")
    given, default = seen
    assert given == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-1.0,
        seed=9,
        stop=["a", "b"],
        ignore_eos=True,
    )
    assert default == SamplingParams(
        temperature=0.0, max_tokens={"chat": 1024, "generate": 256}[command]
    )
