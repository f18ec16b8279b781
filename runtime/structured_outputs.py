"""What a text must look like: a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.runtime.validation import boolean, check_unicode, refusal, strings

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Known to vLLM and not built: the values of each under which it changes nothing.
_NOT_BUILT: dict[str, Any] = {"structural_tag": None, "disable_additional_properties": False}


@dataclass
class StructuredOutputsParams:
    """Exactly one of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar``.

    ``json`` is a schema, as an object or its text; ``json_object`` any JSON object; ``regex``
    describes the whole text; ``choice`` lists the texts to choose from; ``grammar`` is in GBNF
    (``root ::= ...``) or Lark (``start: ...``). JSON may have some white space between its tokens:
    none with ``disable_any_whitespace``, else, where there is some, what the regular expression
    ``whitespace_pattern`` says. The names are vLLM's. Raises InvalidRequest, a ValueError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False  # to another engine: there is one
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_BUILT.items():
            if getattr(self, name) != neutral:
                raise refusal(f"structured_outputs: {name}", "is not supported; leave it out")
        for name in ("disable_fallback", "disable_any_whitespace"):
            boolean(f"structured_outputs: {name}", getattr(self, name))
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise refusal(
                "structured_outputs",
                "needs exactly one of json, json_object, regex, choice and grammar, got "
                f"{' and '.join(given) or 'none'}",
            )
        self._check(given[0])

    def _check(self, kind: str) -> None:
        if kind == "json":
            self.json = _schema(self.json)
        elif kind == "json_object":
            boolean("structured_outputs: json_object", self.json_object)
        elif kind == "choice":
            if isinstance(self.choice, str):
                raise refusal("structured_outputs: choice", "must be a list of strings")
            self.choice = strings("structured_outputs: choice", self.choice)
            if not self.choice:
                raise refusal("structured_outputs: choice", "lists nothing to choose from")
        else:
            _text(kind, getattr(self, kind))
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", self.whitespace_pattern)
            if kind not in ("json", "json_object"):
                raise refusal("structured_outputs: whitespace_pattern", f"is for json, not {kind}")


GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    """The parameters, given as such, as a dict of them, or None."""
    if isinstance(value, Mapping):
        known = {field.name for field in fields(StructuredOutputsParams)}
        unknown = [key for key in value if key not in known]
        if unknown:
            raise refusal(f"{name}:", f"{unknown[0]!r} is not one of {', '.join(sorted(known))}")
        return StructuredOutputsParams(**value)
    if value is not None and not isinstance(value, StructuredOutputsParams):
        raise refusal(name, f"must be StructuredOutputsParams or a dict, got {value!r:.80}")
    return value


def _schema(value: Any) -> Any:
    """A JSON schema: an object, or the text of one."""
    where = "structured_outputs: json"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refusal(where, f"is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise refusal(where, f"must be a JSON schema, an object, got {value!r:.80}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(where, f"is not a JSON schema: {error}") from None
    return value


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise refusal(
            f"structured_outputs: {name}", f"must be a non-empty string, got {value!r:.80}"
        )
    check_unicode(f"structured_outputs: {name}", value)
