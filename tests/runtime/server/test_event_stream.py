"""Events that are written from a rendered head and tail are those that JSON would have given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.runtime.server.event_stream import TextEvent, event
from tests.runtime.server.running_server import InThread

TEXTS = ["", "plain", '"quoted" \\ back', "a\nb\r\t\0\x1f\x7f", "Gr\u00fc\u00dfe \U0001f600 \u2028"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("name", ["toy", 'a "\0" name', '\0","text":"\0'], ids=range(3))
def test_an_event_of_a_text(text: str, name: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        return {"model": name, "choices": [{"delta": {"content": text}, "finish_reason": None}]}

    rendered = TextEvent(chunk).render(text)
    assert rendered == event(chunk(text))
    assert json.loads(rendered.removeprefix(b"data: ")) == chunk(text)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["ab", "c"], "n": 2, "echo": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "n": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_chunks_are_the_same_without_the_short_cut(toy_server: InThread, path: str) -> None:
    """The usage in each chunk, which grows, is what keeps the short cut from being taken."""
    body = {**BODIES[path], "max_tokens": 40, "ignore_eos": True, "seed": 5, "stream": True}
    plain = texts_and_shapes(toy_server, path, body)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert texts_and_shapes(toy_server, path, {**body, **options}) == plain


def texts_and_shapes(server: InThread, path: str, body: Any) -> Any:
    """The text of each choice, and the chunks without their texts, each shape once."""
    with server.http() as client:
        lines = client.post(path, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts: dict[int, str] = {}
    shapes = set()
    for chunk in chunks:
        for name in ("id", "created", "usage"):
            chunk.pop(name, None)
        for choice in chunk["choices"]:
            holder, key = (choice, "text") if "text" in choice else (choice["delta"], "content")
            texts[choice["index"]] = texts.get(choice["index"], "") + holder[key]
            holder[key] = "..."
        shapes.add(json.dumps(chunk))
    shapes.discard(json.dumps({**chunks[-1], "choices": []}))  # the usage alone
    return texts, shapes
