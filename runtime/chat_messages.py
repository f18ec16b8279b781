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
            f'{{"role": "user", "content": "Hi"}}, got {type(messages).__name__}',
            param="messages",
        )
    if not messages:
        raise InvalidRequest("a conversation must hold at least one message", param="messages")
    return [_check(index, message, keeps_parts) for index, message in enumerate(messages)]


def check_tools(tools: Any) -> None:
    """Raises InvalidRequest unless these are None or tools in OpenAI's shape, each of its own name:
    a call of one of two with the same name could not be told from that of the other."""
    if tools is None:
        return
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools must be a list of tools, got {tools!r:.80}", param="tools")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(
                f'tool {number} must be {{"type": "function", "function": {{"name": ...}}}}, got '
                f"{tool!r:.80}",
                param=f"tools[{number}]",
            )
        if name in names:
            raise InvalidRequest(
                f"tools: two are called {name!r:.80}; give each a name of its own", param="tools"
            )
        names.add(name)


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
        raise _refused(where, f" must be a dict with role and content, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str):
        problem = "has no role" if role is None else f"has the role {role!r:.40}"
        raise _refused(where, f" {problem}; give it one such as 'user' or 'assistant'")
    kept = {key: plain(value) for key, value in message.items() if value is not None}
    _check_tool_calls(where, kept.get("tool_calls"))
    kept[_CONTENT] = _content(where, role, kept, keeps_parts)
    return kept


def _check_tool_calls(where: str, calls: Any) -> None:
    if calls is None:
        return
    is_list = isinstance(calls, (list, tuple)) and all(isinstance(call, Mapping) for call in calls)
    if not is_list or not all(isinstance(call.get("function", {}), Mapping) for call in calls):
        raise _refused(
            f"{where}, tool_calls",
            ' must be a list of {"type": "function", "function": {"name": ..., "arguments": ...}}, '
            f"got {calls!r:.80}",
        )


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
    raise _refused(where, f" ({role}) {problem}; give a string or a list of text parts")


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(where, f' must be {{"type": "text", "text": ...}}, got {part!r:.80}')
    kind = part.get("type", "text")
    if kind != "text":
        raise _refused(where, f" has the type {kind!r:.40}; this version takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refused(where, f": its text must be a string, got {text!r:.80}")
    return text


def _refused(where: str, problem: str) -> InvalidRequest:
    """``where``: "message 3", "message 3, part 0" or "message 3, tool_calls"."""
    number, _, field = where.removeprefix("message ").partition(", ")
    path = f"messages[{number}]"
    if field:
        path += ".tool_calls" if field == "tool_calls" else f".content[{field.split()[1]}]"
    return InvalidRequest(f"{where}{problem}", param=path)
