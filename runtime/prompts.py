"""The shapes in which a user may hand over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.policies import Urgency
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.validation import check_token_id, check_unicode, integer, refusal

_SHAPES = (
    'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}, '
    "or a list of these"
)


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run; ``text`` is None when only ids were given.

    Only prompts with the same ``cache_salt`` share what the prefix cache holds; ``urgency`` says
    when it is to run.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None
    urgency: Urgency = field(default_factory=Urgency)


def parse_prompts(
    prompts: Any,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Check and tokenise one prompt or several; raises InvalidRequest for the first bad one.

    Their length is left to ``fit_prompts``.
    """
    items = [prompts] if _is_single(prompts) else prompts
    if not isinstance(items, Sequence):
        raise InvalidRequest(f"a prompt must be {_SHAPES}, got {type(prompts).__name__}")
    if not items:
        raise InvalidRequest("there is no prompt: the list is empty")
    parsed = []
    for index, item in enumerate(items):
        where = _where(index, len(items))
        prompt = _parse_one(where, _plain_ids(item), tokenizer, add_special_tokens)
        _check_ids(where, prompt.token_ids, vocab_size)
        parsed.append(prompt)
    return parsed


def fit_prompts(
    prompts: Sequence[Prompt],
    truncations: Sequence[int | None],
    *,
    tokenizer: Tokenizer | None,
    max_model_len: int,
) -> list[Prompt]:
    """The last tokens of each prompt, as many as its truncation says, which have to fit.

    The text of one that is cut is that of the tokens kept. Raises InvalidRequest for the first that
    leaves no room for an answer.
    """
    fitted = []
    for index, (prompt, count) in enumerate(zip(prompts, truncations, strict=True)):
        kept = _last_tokens(prompt, count, tokenizer)
        num_tokens = len(kept.token_ids)
        if num_tokens + 1 > max_model_len:
            raise refusal(
                _where(index, len(prompts)),
                f"has {num_tokens} tokens, which leaves no room for an answer in "
                f"max_model_len={max_model_len}; shorten it to {max_model_len - 1} or raise "
                "max_model_len",
            )
        fitted.append(kept)
    return fitted


def with_urgency(prompts: Sequence[Prompt], **fields: Any) -> list[Prompt]:
    """The prompts with fields of Urgency: each None, one value for all, or one for each prompt."""
    columns: dict[str, Sequence[Any]] = {}
    for name, value in fields.items():
        if value is None:
            continue
        is_one = isinstance(value, str) or not isinstance(value, Sequence)
        columns[name] = [value] * len(prompts) if is_one else value
        if len(columns[name]) != len(prompts):
            raise InvalidRequest(
                f"{len(columns[name])} values of {name} for {len(prompts)} prompts; give one, or "
                "one each"
            )
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
    return [replace(p, urgency=Urgency(**row)) for p, row in zip(prompts, rows, strict=True)]


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)) or _is_array(prompts):
        return True
    is_list = isinstance(prompts, Sequence) and bool(prompts)
    return (
        is_list
        and not isinstance(prompts[0], (str, Mapping, Sequence))
        and not _is_array(prompts[0])
    )


def _is_array(value: Any) -> bool:
    return getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")


def _plain_ids(item: Any) -> Any:
    return item.tolist() if _is_array(item) else item


def _parse_one(
    where: str, item: Any, tokenizer: Tokenizer | None, add_special_tokens: bool
) -> Prompt:
    if isinstance(item, str):
        return _from_text(where, item, tokenizer, add_special_tokens)
    if isinstance(item, Mapping):
        return _from_mapping(where, item, tokenizer, add_special_tokens)
    if isinstance(item, Sequence) and not isinstance(item, (bytes, bytearray)):
        return Prompt(_token_ids(where, item))
    raise refusal(where, f"must be {_SHAPES}, got {type(item).__name__}")


def _from_mapping(
    where: str, item: Mapping[str, Any], tokenizer: Tokenizer | None, add_special_tokens: bool
) -> Prompt:
    unknown = sorted(set(item) - {"prompt", "prompt_token_ids", "cache_salt"})
    if unknown:
        raise refusal(f"{where}:", f"{unknown[0]!r} is not supported; give {_SHAPES}")
    text = item.get("prompt")
    salt = _cache_salt(where, item.get("cache_salt"))
    if item.get("prompt_token_ids") is not None:
        ids = _token_ids(where, _plain_ids(item["prompt_token_ids"]))
        return Prompt(ids, text if isinstance(text, str) else None, salt)
    if not isinstance(text, str):
        raise refusal(where, "holds neither a prompt string nor prompt_token_ids")
    return replace(_from_text(where, text, tokenizer, add_special_tokens), cache_salt=salt)


def _cache_salt(where: str, salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise refusal("cache_salt", f"must be a non-empty string, got {salt!r:.80}")
    return salt


def _from_text(
    where: str, text: str, tokenizer: Tokenizer | None, add_special_tokens: bool
) -> Prompt:
    if not text:
        raise refusal(where, "is empty; give at least one character")
    if tokenizer is None:
        raise refusal(
            where,
            "is text, but the model came without a tokenizer; give token ids, or compile "
            "it again from a directory with tokenizer.json",
        )
    check_unicode(where, text)
    return Prompt(tuple(tokenizer.encode(text, add_special_tokens)), text)


def _token_ids(where: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise refusal(f"{where}: token ids", f"must be a list, got {type(ids).__name__}")
    if set(map(type, ids)) <= {int}:
        return tuple(ids)  # the usual case: one pass in C
    return tuple(integer(f"{where}: a token id", value) for value in ids)


def _check_ids(where: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise refusal(where, "is empty; give at least one token")
    check_token_id(where, min(ids), vocab_size)
    check_token_id(where, max(ids), vocab_size)


def _where(index: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {index}"


def _last_tokens(prompt: Prompt, count: int | None, tokenizer: Tokenizer | None) -> Prompt:
    if count is None or len(prompt.token_ids) <= count:
        return prompt
    kept = prompt.token_ids[-count:]
    text = None if prompt.text is None or tokenizer is None else tokenizer.decode(kept)
    return replace(prompt, token_ids=kept, text=text)
