"""Tool calls out of the text of an answer, in the formats that models are trained on.

A parser is fed text as it comes, and gives what is plain content and the calls that are complete.
What begins like a call and turns out to be none is content. Feeding a text in pieces gives the same
as feeding it at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str


Parsed = tuple[str, list[ToolCall]]


class ToolParser:
    """The base of all: text up to a marker is content, what follows is a subclass's matter."""

    marker = ""
    keeps_special_tokens = False  # the marker is one of them

    def __init__(self) -> None:
        self._buffer = ""
        self._is_after_call = False

    def feed(self, text: str) -> Parsed:
        """Content that is certain to be content, and calls that are complete."""
        raise NotImplementedError

    def finish(self) -> Parsed:
        """The same for what is held back, when no more text will come."""
        raise NotImplementedError

    def _take_content(self) -> str:
        """Cut from the buffer what precedes the marker, or what may become one.

        White space that only parts calls is dropped.
        """
        if self._is_after_call:
            self._buffer = self._buffer.lstrip()
            self._is_after_call = not self._buffer
        at = self._buffer.find(self.marker)
        if at < 0:
            at = len(self._buffer) - _overlap(self._buffer, self.marker)
        content, self._buffer = self._buffer[:at], self._buffer[at:]
        return content

    def _take_rest(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rest


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen, SmolLM."""

    marker = "<tool_call>"
    _end = "</tool_call>"

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        content, calls = self._take_content(), []
        while self._buffer.startswith(self.marker):
            end = self._buffer.find(self._end)
            if end < 0:
                break
            whole = self._buffer[: end + len(self._end)]
            call = _call(_parsed(whole[len(self.marker) : -len(self._end)]))
            self._buffer = self._buffer[len(whole) :]
            if call is None:
                content += whole
            else:
                calls.append(call)
                self._is_after_call = True
            content += self._take_content()
        return content, calls

    def finish(self) -> Parsed:
        # A model may end without the closing tag.
        call = None
        if self._buffer.startswith(self.marker):
            call = _call(_parsed(self._buffer[len(self.marker) :]))
        rest = self._take_rest()
        return (rest, []) if call is None else ("", [call])


class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}``, several parted by ``;``: Llama 3.1 and later.

    Only an answer that begins so is a call.
    """

    marker = "<|python_tag|>"
    keeps_special_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self._is_content = False
        self._num_calls = 0

    def feed(self, text: str) -> Parsed:
        if self._is_content:
            return text, []
        self._buffer += text
        start = self._start()
        if start and not (start.startswith("{") or self.marker.startswith(start)):
            return self._give_up()
        return ("", self._take_calls()) if "}" in text else ("", [])

    def finish(self) -> Parsed:
        calls = self._take_calls()
        if self._start():
            content, _ = self._give_up()
            return content, calls
        return "", calls

    def _start(self) -> str:
        text = self._buffer.lstrip("; \n\t") if self._num_calls else self._buffer.lstrip()
        return text.removeprefix(self.marker).lstrip()

    def _take_calls(self) -> list[ToolCall]:
        calls = []
        while (start := self._start()).startswith("{"):
            found = _leading_json(start)
            call = None if found is None else _call(found[0])
            if found is None or call is None:
                break
            calls.append(call)
            self._num_calls += 1
            self._buffer = start[found[1] :]
        return calls

    def _give_up(self) -> Parsed:
        self._is_content = True
        return self._take_rest(), []


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or since v11
    ``[TOOL_CALLS]name{...}``, where ``[ARGS]`` may stand before the arguments."""

    marker = "[TOOL_CALLS]"
    keeps_special_tokens = True

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        content, calls = self._take_content(), []
        while self._buffer.startswith(self.marker):
            if not any(char in text for char in "}]"):
                break
            found = self._leading_calls(self._buffer[len(self.marker) :])
            if found is None:
                break
            calls += found[0]
            self._buffer = self._buffer[len(self.marker) + found[1] :]
            self._is_after_call = True
            content += self._take_content()
        return content, calls

    def finish(self) -> Parsed:
        return self._take_rest(), []

    def _leading_calls(self, text: str) -> tuple[list[ToolCall], int] | None:
        """The calls at the start of the text, and where they end."""
        body = text.lstrip()
        start = len(text) - len(body)
        if body.startswith("["):
            found = _leading_json(body)
            items = found[0] if found and isinstance(found[0], list) else []
            calls = [call for item in items if (call := _call(item)) is not None]
            return (calls, start + found[1]) if found and calls else None
        name, brace, _ = body.partition("{")
        found = _leading_json(body[len(name) :]) if brace else None
        name = name.removesuffix("[ARGS]").strip()
        if found is None or not name:
            return None
        end = start + body.index("{") + found[1]
        return [ToolCall(name, _json_text(found[0]))], end


class ForcedParser(ToolParser):
    """An answer that a grammar made a call: its arguments when ``name`` is given, else a list of
    ``{"name": ..., "arguments": ...}``. What is cut off, so that it is no JSON, is content."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        return "", []

    def finish(self) -> Parsed:
        text = self._take_rest()
        value = _parsed(text)
        if self._name is not None:
            return ("", [ToolCall(self._name, text)]) if isinstance(value, dict) else (text, [])
        calls = [_call(item) for item in value] if isinstance(value, list) else []
        whole = [call for call in calls if call is not None]
        return ("", whole) if whole else (text, [])


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def parser_for_template(template: str) -> str | None:
    """The parser whose format a chat template tells the model to use."""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3_json"
    return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _leading_json(text: str) -> tuple[Any, int] | None:
    """The JSON value at the start of a text, and where it ends; None when it is not whole."""
    try:
        return _DECODER.raw_decode(text)
    except ValueError:
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON within JSON
        return ToolCall(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], _json_text(arguments))


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """How long an end of the text is that the marker may begin with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
