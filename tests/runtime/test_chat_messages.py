"""Content parts: kept where a template loops over them, joined elsewhere, text only."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.runtime.chat_template import ChatTemplate
from octavo.runtime.errors import InvalidRequest

TEXT = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
# As Qwen3's: what is no string is dropped, and a loop is over something else.
STRING_OR_NOTHING = (
    "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}"
    "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}"
    "{% endif %}{% for line in content.split('|') %}{{ line }}{% endfor %};{% endfor %}"
)
LOOPS = {
    "getattr": "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    "{% endfor %}",
    "filter": "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', "
    "'text') %}[{{ p['text'] }}]{% endfor %}{% endfor %}",
    "slice": "{% for m in messages %}{% for p in m['content'][0:] %}[{{ p.text }}]{% endfor %}"
    "{% endfor %}",
    "name": "{% for m in messages %}{% set parts = m.content %}{% for p in parts %}[{{ p.text }}]"
    "{% endfor %}{% endfor %}",
    "macro": "{% macro show(content) %}{% for p in content %}[{{ p.text }}]{% endfor %}"
    "{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
}
PARTS = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]


def render(template: str, *messages: Any) -> str:
    return ChatTemplate(template).render(messages)


@pytest.mark.parametrize(
    ("template", "expected"), [(TEXT, "user:a\nb\nc;"), (STRING_OR_NOTHING, "a\nb\nc;")]
)
def test_parts_are_joined_for_a_template_that_wants_text(template: str, expected: str) -> None:
    assert render(template, {"role": "user", "content": PARTS}) == expected


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_parts_are_kept_for_a_template_that_loops_over_them(template: str) -> None:
    assert render(template, {"role": "user", "content": PARTS}) == "[a][b][c]"


def test_calls_need_no_content() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for message in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        assert render(TEXT, message | {"tool_calls": calls}) == "assistant:;"


def test_what_a_tool_returns_may_be_an_object() -> None:
    template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert render(template, {"role": "tool", "content": {"a": 1}}) == '{"a": 1}'


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "Hi"}, "message 1 has no role; give it one"),
        ({"role": 3, "content": "Hi"}, "message 1 has the role 3"),
        ({"role": "user"}, r"message 1 \(user\) has no content; give a string"),
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "has no content"),
        ({"role": "user", "content": 3}, "has the content 3; give a string"),
        ({"role": "user", "content": {"text": "x"}}, "give a string or a list of text parts"),
        ({"role": "user", "content": [3]}, 'part 0 must be {"type": "text"'),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "message 1, part 1 has the type 'image_url'; this version takes text only",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0: its text must be a string"),
    ],
)
def test_a_message_that_is_none_is_named(message: dict[str, Any], words: str) -> None:
    for template in (TEXT, LOOPS["getattr"]):
        with pytest.raises(InvalidRequest, match=words):
            render(template, {"role": "user", "content": "Hi"}, message)
