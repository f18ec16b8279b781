"""Guided decoding: which tokens may come next, by llguidance.

A grammar is compiled once and kept; each request walks a copy of it, token by token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection

import llguidance
import numpy as np
from numpy.typing import NDArray

from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.logit_edits import MASK_BITS
from octavo.runtime.structured_outputs import StructuredOutputsParams
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.validation import refusal

MAX_KEPT = 128
# White space that JSON may have between its tokens. Bounded, or a model could go on with it and
# never come to an end; deep enough for any usual indentation.
WHITESPACE = r"[ \n\r\t]{0,64}"


class Grammars:
    """The grammars for one tokenizer, as they are asked for. Any thread may use it."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """``vocab_size`` is the model's, whose end is ``eos_token_ids``."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def guide(self, params: StructuredOutputsParams) -> Guide:
        """A walk from the start of a grammar. Raises InvalidRequest when it makes no sense."""
        grammar = _grammar(params)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = self._compile(grammar)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return Guide(self._kept[grammar].deep_copy(), self._mask_size, self._vocab_size)

    @property
    def _mask_size(self) -> int:
        assert self._vocabulary is not None
        return -(-self._vocabulary.vocab_size // MASK_BITS)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        matcher.compute_bitmask()  # what it learns, its copies know
        if matcher.is_error():
            raise _refused(f"no text can be like this: {matcher.get_error()}")
        return matcher

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        """About a second for a large vocabulary."""
        if self._tokenizer is None:
            raise refusal("structured_outputs", "need a tokenizer, and the model has none")
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._eos_token_ids or None,
            )
        except ValueError as error:
            raise _refused(f"the tokenizer cannot be used: {error}") from None


class Guide:
    """Where one request's text is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_size: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(mask_size, dtype=np.int32)
        self._num_words = -(-vocab_size // MASK_BITS)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and can only end."""
        return self._matcher.is_stopped()

    def mask(self) -> NDArray[np.int32]:
        """A bit for each token that may come next: see LogitEdits. Valid until the next call.

        The end of the text may where the grammar accepts the text as it is.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        return self._words[: self._num_words]

    def append(self, token_id: int) -> None:
        """Take a token of the text, or its end. Raises EngineError if it may not be there."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"structured_outputs: {_one_line(self._matcher.get_error())}")


def _grammar(params: StructuredOutputsParams) -> str:
    """In llguidance's form."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = [json.dumps(text, ensure_ascii=False) for text in params.choice]
        return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    if params.grammar is not None:
        return _from_text(params.grammar)
    return _from_schema(params)


def _from_schema(params: StructuredOutputsParams) -> str:
    pattern = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    is_compact = params.disable_any_whitespace
    schema = {"type": "object"} if params.json is None else params.json
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={"whitespace_flexible": False}
            if is_compact
            else {"whitespace_pattern": pattern},
        )
    except ValueError as error:  # too deep, or half of a surrogate pair
        raise _refused(f"json: {error}") from None


def _from_text(grammar: str) -> str:
    if "::=" not in grammar:
        return llguidance.LLMatcher.grammar_from_lark(grammar)
    try:
        return llguidance.grammar_from("gbnf", grammar)
    except ValueError as error:
        raise _refused(str(error)) from None


def _refused(reason: str) -> InvalidRequest:
    return refusal("structured_outputs:", _one_line(reason))


def _one_line(text: str) -> str:
    """Without the state of the parser, which may follow."""
    return " ".join(text.partition("<state>")[0].split())[:300]
