"""Conversations as a chat template wants them: plain messages whose content is text.

OpenAI's content parts, ``[{"type": "text", "text": ...}]``, are handled as vLLM does it
(entrypoints/chat_utils.py): kept for a template that loops over them, joined for any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

from octavo.runtime.errors import InvalidRequest

_CONTENT = "content"
# What a tool returns may be an object, which a template writes as JSON.
_TOOL_ROLES = ("tool", "function", "ipython")


def check_messages(messages: Any, *, keeps_parts: bool) -> list[dict[str, Any]]:
    """A conversation as plain dicts, without the keys whose value is None.

    Content parts are joined by newlines unless ``keeps_parts``. Raises InvalidRequest for the first
    message that is none.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            "a conversation must be a list of messages such as "
            f'{{"role": "user", "content": "Hi"}}, got {type(messages).__name__}'
        )
    if not messages:
        raise InvalidRequest("a conversation must hold at least one message")
    return [_check(index, message, keeps_parts) for index, message in enumerate(messages)]


def plain(value: Any) -> Any:
    """The value rebuilt from JSON's types: an object's methods are no business of a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    for kind in (str, int, float):  # subclasses carry methods of their own
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def loops_over_parts(template: nodes.Template) -> bool:
    """Whether a template takes content apart: has a loop over a message's content.

    A test ``content is string`` alone tells nothing: templates that have one may drop all else.
    """
    names = {_CONTENT}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):  # message.content | selectattr(...)
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == _CONTENT
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    return isinstance(node, nodes.Name) and node.name in names


def _check(index: int, message: Any, keeps_parts: bool) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be a dict with role and content, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str):
        problem = "has no role" if role is None else f"has the role {role!r:.40}"
        raise InvalidRequest(f"{where} {problem}; give it one such as 'user' or 'assistant'")
    kept = {key: plain(value) for key, value in message.items() if value is not None}
    kept[_CONTENT] = _content(where, role, kept, keeps_parts)
    return kept


def _content(where: str, role: str, message: Mapping[str, Any], keeps_parts: bool) -> Any:
    content = message.get(_CONTENT)
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = [_text(f"{where}, part {number}", part) for number, part in enumerate(content)]
        if keeps_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)
    if content is None and role == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, Mapping) and role in _TOOL_ROLES:
        return content
    problem = "has no content" if content is None else f"has the content {content!r:.40}"
    raise InvalidRequest(f"{where} ({role}) {problem}; give a string or a list of text parts")


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f'{where} must be {{"type": "text", "text": ...}}, got {part!r:.80}')
    kind = part.get("type", "text")
    if kind != "text":
        raise InvalidRequest(f"{where} has the type {kind!r:.40}; this version takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: its text must be a string, got {text!r:.80}")
    return text
