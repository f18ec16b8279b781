"""``octavo chat`` and ``octavo generate`` over a model that repeats what it was told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli.main import app
from octavo.ir.errors import OctavoError
from octavo.runtime.sampling_params import SamplingParams


class EchoLLM:
    """Answers with its messages; ``fail`` as the last message is refused in mid-stream."""

    def __init__(self, path: Path) -> None:
        self.last_stats: SimpleNamespace | None = None

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[str]:
        yield "I heard: "
        if messages[-1]["content"] == "fail":
            raise OctavoError("too long")
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
    (tmp_path / "manifest.json").write_text("{}")
    return str(tmp_path)


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
    assert result.stdout.endswith(
        "I heard: user one | assistant I heard: user one | user three\n> \n"
    )


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
