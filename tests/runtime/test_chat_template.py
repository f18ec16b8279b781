"""Rendered as transformers renders, template by template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.runtime.chat_template import ChatTemplate
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.toy_artifact import CHAT_TEMPLATE, byte_tokenizer

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
BLOCKS = """
{%- if tools %}
    {{- "# Tools\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(found=false, dict=1) %}
{% for message in messages %}
    {% if message.role == "skip" %}
        {% continue %}
    {% endif %}
    {% if message.content is string %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
        {% for part in message.content %}{{ part.text | trim }}
            {%- if not loop.last %}, {% endif %}
        {% endfor %}
    {% endif %}
    {% if message.reasoning_content is defined %}
        {{- "<think>" + message.reasoning_content + "</think>" }}
    {% endif %}
    {% set ns.found = true %}
{% endfor %}
{{ ns.found }} {{ dict(a=1) | tojson }} {{ documents is none }} {{ flag | default("no flag") }}
{% if add_generation_prompt %}assistant:{% endif %}
"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "llama2": LLAMA2, "blocks": BLOCKS}
USER = {"role": "user", "content": "Hi <b>&amp; 你好 🙂"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "  Yes.  "}, USER],
    "nulls": [{**USER, "tool_calls": None}],
}


def both(template: str) -> tuple[Tokenizer, Any]:
    ours = Tokenizer(
        byte_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, {"default": template}
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>"
    )
    theirs.chat_template = template
    return ours, theirs


def assert_same(template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    ours, theirs = both(template)
    text = ours.render_chat(chat, **options)
    assert text == theirs.apply_chat_template(chat, tokenize=False, **options)
    ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
    assert ours.apply_chat_template(chat, **options) == ids
    return text


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("add", [True, False])
def test_same_text_and_ids(template: str, chat: list[dict[str, Any]], add: bool) -> None:
    assert_same(template, chat, add_generation_prompt=add)


def test_tools_loops_reasoning_and_variables() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    chat: list[dict[str, Any]] = [
        {"role": "skip", "content": "unseen"},
        {
            "role": "user",
            "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "thinking": "hm"},
    ]
    text = assert_same(BLOCKS, chat, tools=tools, flag="yes", add_generation_prompt=False)
    assert "<think>hm</think>" in text
    assert "unseen" not in text


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA2])
@pytest.mark.parametrize("end", ["Sure", "Sure, ", "Sure\n"])
def test_the_final_message_is_continued(template: str, end: str) -> None:
    chat = [USER, {"role": "assistant", "content": end}]
    text = assert_same(template, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith(end.rstrip())


def test_the_conversation_is_left_as_it_was() -> None:
    chat = [USER, {"role": "assistant", "content": "Sure"}]
    ChatTemplate(CHAT_TEMPLATE).render(
        chat, add_generation_prompt=False, continue_final_message=True, bos_token="<s>"
    )
    assert chat == [USER, {"role": "assistant", "content": "Sure"}]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "at least one message"),
        ("Hi", "a list of messages"),
        ({"role": "user"}, "a list of messages"),
        (["Hi"], "message 0 must be a dict with role and content"),
        ([{"role": "assistant", "content": "Hi"}], "roles must alternate"),
    ],
)
def test_a_bad_conversation_is_refused(chat: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(LLAMA2).render(chat, bos_token="<s>", eos_token="</s>")


def test_to_continue_and_to_start_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="add_generation_prompt=False"):
        ChatTemplate(LLAMA2).render([USER], continue_final_message=True)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__x=1) %}",
    ],
)
def test_a_template_is_not_trusted(attack: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses"):
        ChatTemplate(attack).render([USER])


@pytest.mark.parametrize(
    "faulty",
    [
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_by_itself(faulty: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses"):
        ChatTemplate(faulty).render([USER])


def test_a_template_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        ChatTemplate("{% if %}")


def test_named_templates() -> None:
    ours = Tokenizer(byte_tokenizer(), {}, {"default": "d", "tool_use": "t", "other": "o"})
    assert ours.render_chat([USER]) == "d"
    assert ours.render_chat([USER], tools=[{}]) == "t"
    assert ours.render_chat([USER], chat_template="other") == "o"
    assert ours.render_chat([USER], chat_template="{{ 1 + 1 }}") == "2"
    with pytest.raises(InvalidRequest, match="a, b, and no default"):
        Tokenizer(byte_tokenizer(), {}, {"a": "", "b": ""}).render_chat([USER])
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(byte_tokenizer(), {}, {}).render_chat([USER])
