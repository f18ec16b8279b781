"""Tool calls, in the formats as their models' own templates and documents show them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.server.tool_parsers import (
    PARSERS,
    ForcedParser,
    ToolCall,
    ToolParser,
    parser_for_template,
)

WEATHER = ToolCall("get_weather", '{"city": "Zürich", "days": 2}')
TIME = ToolCall("get_time", "{}")

CASES = [
    # (parser, text of the model, content, calls)
    ("hermes", "It is sunny.", "It is sunny.", []),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        "</tool_call>",
        "",
        [WEATHER],
    ),
    (
        "hermes",
        'I look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
        "I look.\n",
        [WEATHER, TIME],
    ),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}', "", [TIME]),
    ("hermes", "<tool_call>nonsense</tool_call> well", "<tool_call>nonsense</tool_call> well", []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("llama3_json", "It is sunny.", "It is sunny.", []),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}',
        "",
        [WEATHER],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; '
        '{"name": "get_time", "parameters": {}}',
        "",
        [WEATHER, TIME],
    ),
    ("llama3_json", '{"answer": 42} it is', '{"answer": 42} it is', []),
    ("llama3_json", '{"name": "f", "para', '{"name": "f", "para', []),
    ("llama3_json", "<|pyth", "<|pyth", []),
    ("mistral", "It is sunny.", "It is sunny.", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, '
        '{"name": "get_time", "arguments": {}}]',
        "",
        [WEATHER, TIME],
    ),
    (
        "mistral",
        'Let me see.[TOOL_CALLS]get_weather{"city": "Zürich", "days": 2}'
        "[TOOL_CALLS]get_time[ARGS]{}",
        "Let me see.",
        [WEATHER, TIME],
    ),
    ("mistral", "[TOOL_CALLS] [nonsense]", "[TOOL_CALLS] [nonsense]", []),
    ("mistral", "[TOOL", "[TOOL", []),
]

MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
OBJECTS = ['{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {}}']
LISTS = ['[{"name": "h", "arguments": {}}]', '{"a": "}"}']
FRAGMENTS = [*MARKERS, *OBJECTS, *LISTS, *"f \n{}[];"]


def parse(parser: ToolParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    content, calls = "", []
    for piece in pieces:
        found, new = parser.feed(piece)
        content, calls = content + found, calls + new
    found, new = parser.finish()
    return content + found, calls + new


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_at_once_and_by_characters(
    name: str, text: str, content: str, calls: list[ToolCall]
) -> None:
    assert parse(PARSERS[name](), [text]) == (content, calls)
    assert parse(PARSERS[name](), list(text)) == (content, calls)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_make_no_difference(name: str, data: st.DataObject) -> None:
    fragment = st.sampled_from(FRAGMENTS)
    text = "".join(data.draw(st.lists(fragment, max_size=10)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert parse(PARSERS[name](), pieces) == parse(PARSERS[name](), [text])


def test_content_before_a_call_is_not_held_back() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed("Let me see <") == ("Let me see ", [])
    assert parser.feed("b") == ("<b", [])


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    for name, text, _, calls in CASES:
        if name == "hermes" and len(calls) == 2:
            parser = PARSERS[name]()
            end = text.index("</tool_call>") + len("</tool_call>")
            assert parser.feed(text[:end])[1] == calls[:1]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("f", '{"a": 1}', "", [ToolCall("f", '{"a": 1}')]),
        ("f", '{"a": 1', '{"a": 1', []),
        (None, '[{"name": "f", "arguments": {"a": 1}}]', "", [ToolCall("f", '{"a": 1}')]),
        (None, '[{"name": "f"', '[{"name": "f"', []),
    ],
)
def test_calls_that_a_grammar_made(
    name: str | None, text: str, content: str, calls: list[ToolCall]
) -> None:
    assert parse(ForcedParser(name), list(text)) == (content, calls)


def test_the_template_names_the_format() -> None:
    assert parser_for_template("{{ '<tool_call>' }}") == "hermes"
    assert parser_for_template("[AVAILABLE_TOOLS]..[TOOL_CALLS]") == "mistral"
    assert parser_for_template('Respond {"name": f, "parameters": dict}') == "llama3_json"
    assert parser_for_template("{{ messages }}") is None


def test_arguments_are_json_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    [call] = parse(PARSERS["hermes"](), [text])[1]
    assert json.loads(call.arguments) == {"a": 1}
