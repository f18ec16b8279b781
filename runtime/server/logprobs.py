"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.runtime.outputs import Logprob
from octavo.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(256 + at), byte) for at, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """The bytes of a token whose text is known; right also where it is a part of a character."""
    if _REPLACEMENT in text:
        token = tokenizer.convert_ids_to_tokens(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            return [int(match[1], 16)]
        if token and all(char in _BYTE_OF for char in token):
            return [_BYTE_OF[char] for char in token]
    return list(text.encode())


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    tokenizer: Tokenizer,
    num_top: int,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion, with the ``num_top`` best of each token."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        best = sorted(entry.items(), key=_rank)[:num_top]
        content.append(
            {
                **_entry(tokenizer, token_id, entry[token_id]),
                "top_logprobs": [_entry(tokenizer, each, value) for each, value in best],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    offset: int,
    decode: Callable[[int], str],
) -> tuple[dict[str, Any], int]:
    """``choices[].logprobs`` of a completion, and the offset of the text that comes next.

    None stands for a token that was not predicted, the first of a prompt; its text is by
    ``decode``.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        chosen = None if entry is None else entry[token_id]
        text = decode(token_id) if chosen is None else chosen.decoded_token or ""
        tokens.append(text)
        values.append(None if chosen is None else _finite(chosen.logprob))
        offsets.append(offset)
        offset += len(text)
        best = [] if entry is None else sorted(entry.items(), key=_rank)[:num_top]
        tops.append({each.decoded_token or "": _finite(each.logprob) for _, each in best} or None)
    found = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }
    return found, offset


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None], num_top: int
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` in vLLM's shape: of each token, the one that stands there and the best.

    ``entries`` may hold more than the ``num_top`` best; -1 is all of them.
    """
    return [None if entry is None else _prompt_entry(entry, num_top) for entry in entries]


def _prompt_entry(entry: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    actual = next(iter(entry))  # the token of the prompt comes first
    return {
        str(token_id): {**value._asdict(), "logprob": _finite(value.logprob)}
        for token_id, value in entry.items()
        if num_top == -1 or token_id == actual or (value.rank or 0) <= num_top
    }


def _rank(item: tuple[int, Logprob]) -> float:
    return -item[1].logprob if item[1].rank is None else item[1].rank


def _entry(tokenizer: Tokenizer, token_id: int, value: Logprob) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {
        "token": text,
        "logprob": _finite(value.logprob),
        "bytes": token_bytes(tokenizer, token_id, text),
    }


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI's API says -9999 for a token that could not come."""
    return max(value, -9999.0)
