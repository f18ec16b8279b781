"""Tools through OpenAI's client, over a model that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.server.running_server import InThread, in_thread

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(echo_artifact: Path) -> Iterator[InThread]:
    with in_thread(echo_artifact, tool_parser="hermes") as server:
        yield server


@pytest.fixture
def client(server: InThread) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def ask(client: openai.OpenAI, answer: str, **more: Any) -> Any:
    """A conversation that the model answers with ``answer``."""
    messages: Any = [{"role": "user", "content": answer}]
    defaults = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**{**defaults, **more})


def test_a_call_in_one_piece(client: openai.OpenAI) -> None:
    [choice] = ask(client, CALL, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich"}


def test_calls_streamed(client: openai.OpenAI) -> None:
    content, calls = "", {}
    for chunk in ask(client, f"I look. {CALL}\n{CALL}", tools=TOOLS, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index not in calls
            calls[call.index] = call
    assert (content, choice.finish_reason) == ("I look. ", "tool_calls")
    assert sorted(calls) == [0, 1]
    assert len({call.id for call in calls.values()}) == 2
    for call in calls.values():
        assert json.loads(call.function.arguments) == {"city": "Zürich"}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=str)
def test_without_tools_a_call_is_text(client: openai.OpenAI, more: dict[str, Any]) -> None:
    [choice] = ask(client, CALL, **more).choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert choice.message.tool_calls is None


def test_an_answer_without_a_call(client: openai.OpenAI) -> None:
    [choice] = ask(client, "Sunny.", tools=TOOLS).choices
    assert (choice.message.content, choice.finish_reason) == ("Sunny.", "stop")


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    [choice] = ask(client, CALL, tools=TOOLS, max_tokens=30).choices
    assert choice.message.content == CALL.encode()[:30].decode()
    assert choice.finish_reason == "length"


def test_a_conversation_with_a_call_in_it(client: openai.OpenAI) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "So?"},
    ]
    [choice] = ask(client, "", messages=messages, tools=TOOLS).choices
    assert choice.message.content == "So?"
    function["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="are not JSON"):
        ask(client, "", messages=messages)


def test_a_named_tool_must_be_there(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="names 'other', which is not among tools"):
        ask(client, "x", tools=TOOLS, tool_choice=named)
