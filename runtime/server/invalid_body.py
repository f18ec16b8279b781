"""What pydantic finds wrong with a body, told as OpenAI's API tells it: by the field's path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.runtime.server.api_errors import ApiError

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
# Each branch of this union would name another element as the wrong one.
_PROMPT = "a string, an array of strings, an array of token ids, or an array of those"
_NOUNS = (
    (type(None), "null"),
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal number"),
    (str, "a string"),
    (Sequence, "an array"),
    (Mapping, "an object"),
)


@dataclass(frozen=True)
class _Problem:
    """One that pydantic reports. ``path`` is the field's; ``union`` that of the union it is in."""

    path: tuple[str | int, ...]
    union: tuple[str | int, ...] | None
    kind: str
    text: str
    value: Any
    context: Mapping[str, Any]


def explain_invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first problem of a body, of whose shape pydantic has said ``errors``."""
    problems = [_problem(error, body) for error in errors]
    first = problems[0]
    if first.kind == "json_invalid":
        reason = first.context.get("error", first.text)
        return ApiError(400, f"We could not parse the JSON body of your request: {reason}")
    if not first.path:
        message = "the body must be a JSON object; send it with Content-Type: application/json"
        return ApiError(400, message)
    if first.path[0] == "prompt" and first.kind != "missing":
        value = body["prompt"]
        return _wrong_type("prompt", _PROMPT, value)
    return _explain(_branches(problems))


def _problem(error: Mapping[str, Any], body: Any) -> _Problem:
    """Pydantic puts a tag for the branch of a union into a path, where the body has no such key."""
    path: list[str | int] = []
    union: tuple[str | int, ...] | None = None
    value = body
    parts = [part for part in error["loc"] if part != "body"]
    for place, part in enumerate(parts):
        is_named = error["type"] == "missing" and place == len(parts) - 1
        if is_named or _holds(value, part):
            path.append(part)
            value = None if is_named else value[part]
        else:
            union = tuple(path)
    if error["type"] == "json_invalid":
        path = []
    context = error.get("ctx", {})
    return _Problem(tuple(path), union, error["type"], str(error["msg"]), value, context)


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, dict) and part in value


def _branches(problems: Sequence[_Problem]) -> list[_Problem]:
    """The problems at the first one's place: of a union those of the branch that got furthest."""
    first = problems[0]
    if first.union is None:
        return [first]
    branches = [problem for problem in problems if problem.union == first.union]
    deepest = max(branches, key=lambda problem: len(problem.path))
    return [problem for problem in branches if problem.path == deepest.path]


def _explain(problems: Sequence[_Problem]) -> ApiError:
    first = problems[0]
    name = _written(first.path)
    if first.kind == "missing":
        message = f"Missing required parameter: '{name}'."
        return ApiError(400, message, param=name, code="missing_required_parameter")
    if first.kind == "extra_forbidden":
        message = f"Unknown parameter: '{name:.200}'."
        return ApiError(400, message, param=name, code="unknown_parameter")
    if first.kind == "literal_error" and isinstance(first.value, str):
        supported = first.context.get("expected", "")
        message = f"Invalid value: {first.value!r:.80}. Supported values are: {supported}."
        return ApiError(400, message, param=name, code="invalid_value")
    expected = [_expected(problem) for problem in problems]
    if None in expected:
        return ApiError(400, f"Invalid value for '{name}': {first.text}.", param=name)
    return _wrong_type(name, " or ".join(dict.fromkeys(map(str, expected))), first.value)


def _expected(problem: _Problem) -> str | None:
    if problem.kind == "literal_error":
        return str(problem.context.get("expected"))
    return _EXPECTED.get(problem.kind)


def _wrong_type(name: str, expected: str, value: Any) -> ApiError:
    got = next((noun for kind, noun in _NOUNS if isinstance(value, kind)), type(value).__name__)
    message = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return ApiError(400, message, param=name, code="invalid_type")


def _written(path: Sequence[str | int]) -> str:
    """A path as OpenAI writes it: ``tools[0].function.name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
