"""Chat templates, rendered as transformers does it (utils/chat_template_utils.py, version 5).

Without importing transformers, which takes seconds. Templates come with a model and are not
trusted: they run in Jinja's immutable sandbox and see plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.runtime.chat_messages import check_messages, loops_over_parts, plain
from octavo.runtime.errors import InvalidRequest

# Names under which a message's reasoning is passed; templates read one or another of them.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What a template may raise; the rest is not its fault.
_REFUSALS = (
    jinja2.TemplateError,
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError),
)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_text"), [], [], body)
        return call.set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Raises InvalidRequest when the source is not a Jinja template."""
        self.source = source
        try:
            tree = _environment().parse(source)
            self._template = _environment().from_string(tree)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template is not valid Jinja: {error}") from None
        self._keeps_parts = loops_over_parts(tree)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. ``variables`` are the special tokens, tools and so on.

        ``continue_final_message`` ends the prompt where the last message's content ends.
        Raises InvalidRequest when the conversation is not one or the template refuses it.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False: the model either "
                "continues the last message or starts one"
            )
        checked = check_messages(messages, keeps_parts=self._keeps_parts)
        chat = [_alias_reasoning(message) for message in checked]
        final_text = _tag_final_text(chat) if continue_final_message else None
        variables = {"tools": None, "documents": None, **variables}
        try:
            rendered = self._template.render(
                messages=chat, add_generation_prompt=add_generation_prompt, **plain(variables)
            )
        except _REFUSALS as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}") from None
        return rendered if final_text is None else _cut_at_tag(rendered, final_text)


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    for name in _REASONING_FIELDS:
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _tag_final_text(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and give the text without the mark."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _CONTINUE_TAG
            return text
    raise InvalidRequest("continue_final_message: the last message has no text to continue")


def _cut_at_tag(rendered: str, final_text: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in rendered or tag not in rendered:
        raise InvalidRequest(
            "continue_final_message: the template drops or changes the last message"
        )
    end = rendered.rindex(tag)
    is_spacing_kept = rendered.startswith(_CONTINUE_TAG, end)
    return rendered[:end] if is_spacing_kept else rendered[:end].rstrip()


class _Dict:
    """Jinja's ``dict``, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without the underscore names that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
