"""What is said of bodies that make no sense: OpenAI's words, and the path of the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.server.running_server import InThread
from tests.runtime.toy_artifact import byte_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
PROMPTS = "a string, an array of strings, an array of token ids, or an array of those"


def refused(server: InThread, path: str, body: Any) -> tuple[str, str | None, str | None]:
    """The message, the param and the code of a 400."""
    with server.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"], error["param"], error["code"]


@pytest.mark.parametrize(
    ("more", "param", "expected", "got"),
    [
        ({"temperature": "hot"}, "temperature", "a number", "a string"),
        ({"temperature": [1]}, "temperature", "a number", "an array"),
        ({"n": 1.5}, "n", "an integer", "a decimal number"),
        ({"n": True}, "n", "an integer", "a boolean"),
        ({"echo": 1}, "echo", "a boolean", "an integer"),
        ({"stop": 5}, "stop", "a string or an array", "an integer"),
        ({"stop": {"a": 1}}, "stop", "a string or an array", "an object"),
        ({"stop": ["a", 5]}, "stop[1]", "a string", "an integer"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "a number", "a string"),
        ({"logit_bias": [5]}, "logit_bias", "an object", "an array"),
        ({"stop_token_ids": [1, None]}, "stop_token_ids[1]", "an integer", "null"),
        ({"stream_options": 1}, "stream_options", "an object", "an integer"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "a boolean",
            "an integer",
        ),
        ({"prompt": 5}, "prompt", PROMPTS, "an integer"),
        ({"prompt": None}, "prompt", PROMPTS, "null"),
        ({"prompt": ["a", 5]}, "prompt", PROMPTS, "an array"),
        ({"prompt": {"str": 1}}, "prompt", PROMPTS, "an object"),
    ],
)
def test_a_field_of_another_type(
    toy_server: InThread, more: dict[str, Any], param: str, expected: str, got: str
) -> None:
    message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
    found = refused(toy_server, COMPLETIONS, {"prompt": "a", **more})
    assert found == (message, param, "invalid_type")


@pytest.mark.parametrize(
    ("more", "param", "message", "code"),
    [
        ({"messages": None}, "messages", "expected an array, but got null", "invalid_type"),
        ({"messages": [5]}, "messages[0]", "expected an object, but got an int", "invalid_type"),
        ({"tools": 5}, "tools", "expected an array, but got an integer", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter", 0),
        ({"tools": [{**FUNCTION, "x": 1}]}, "tools[0].x", "Unknown parameter: 'tools[0].x'", 1),
        ({"tools": [{**FUNCTION, "type": "x"}]}, "tools[0].type", "Invalid value: 'x'", 2),
        ({"tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'", 2),
        ({"tool_choice": 5}, "tool_choice", "'required' or an object, but got an int", 3),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing required", 0),
        (
            {"tool_choice": {"type": "function", "function": {"name": 5}}},
            "tool_choice.function.name",
            "expected a string, but got an integer",
            3,
        ),
        ({"modalities": ["audio"]}, "modalities[0]", "Supported values are: 'text'.", 2),
        ({"temprature": 1}, "temprature", "Unknown parameter: 'temprature'.", 1),
    ],
)
def test_a_chat_of_another_shape(
    echo_server: InThread, more: dict[str, Any], param: str, message: str, code: Any
) -> None:
    codes = ("missing_required_parameter", "unknown_parameter", "invalid_value", "invalid_type")
    found = refused(echo_server, CHAT, {"messages": [USER], **more})
    assert message in found[0]
    assert found[1:] == (param, code if isinstance(code, str) else codes[code])


def test_what_is_missing(toy_server: InThread) -> None:
    for path, name in ((COMPLETIONS, "prompt"), (CHAT, "messages"), ("/detokenize", "tokens")):
        found = refused(toy_server, path, {})
        message = f"Missing required parameter: '{name}'."
        assert found == (message, name, "missing_required_parameter")


@pytest.mark.parametrize("content", ['"text"', "[1]", "5"])
def test_a_body_that_is_no_object(toy_server: InThread, content: str) -> None:
    with toy_server.http() as client:
        kind = {"Content-Type": "application/json"}
        answer = client.post(COMPLETIONS, content=content, headers=kind)
    assert answer.status_code == 400
    assert "must be a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a" * 1000}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"min_tokens": 100}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"priority": 1}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_an_impossible_value(toy_server: InThread, more: dict[str, Any], param: str) -> None:
    _, found, _ = refused(toy_server, COMPLETIONS, {"prompt": "a", **more})
    assert found == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{**USER, "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_calls": [5]}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_calls": [{"function": 5}]}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "content": "a" * 1000}]}, "messages"),
        ({"tools": [FUNCTION, FUNCTION], "tool_choice": "required"}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_impossible_conversation(
    echo_server: InThread, more: dict[str, Any], param: str, stream: bool
) -> None:
    _, found, _ = refused(echo_server, CHAT, {"messages": [USER], **more, "stream": stream})
    assert found == param


# The toy's tokens are characters: 257 is the end of a text, and here are two more.
A, B = byte_tokenizer().encode("AB", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": [A, B], "bad_words": ["A", "B"]},
        {"allowed_token_ids": [257], "min_tokens": 1},
        {"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 1},
        {"allowed_token_ids": [A], "structured_outputs": {"regex": "B+"}},
    ],
    ids=range(4),
)
@pytest.mark.parametrize("count", [1, 2])
def test_rules_that_no_token_can_meet(
    toy_server: InThread, more: dict[str, Any], count: int
) -> None:
    message, param, _ = refused(toy_server, COMPLETIONS, {"prompt": "a", "n": count, **more})
    assert "no token may come first" in message
    assert param == "allowed_token_ids"
    toy_server.wait_until_idle()


def test_rules_that_one_token_can_meet(toy_server: InThread) -> None:
    rules = {"allowed_token_ids": [257, A, B], "min_tokens": 1, "bad_words": ["A"]}
    with toy_server.http() as client:
        answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **rules})
    assert answer.json()["choices"][0]["text"] == "B"
