"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
PROMPT_CONTEXT = 6


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    special_token_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class IncrementalDetokenizer:
    """Pieces of text whose concatenation is the text of all tokens decoded at once.

    A token's text depends on its neighbours: a character may span tokens, and a leading space is
    dropped at the very start. So each piece is the difference of two decodes over a short window:
    tokens whose text is out already, then those whose text is not. While the window ends in U+FFFD
    its last character may be incomplete, and is held back.

    The window starts with the prompt's last tokens, so that the text continues the prompt. A prompt
    that ends within a character is left out: no text continues half a character.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skipped = decoder.special_token_ids if skip_special_tokens else frozenset()
        context = [i for i in prompt_token_ids[-PROMPT_CONTEXT:] if i not in self._skipped]
        context_text = decoder.decode(context)
        if context_text.endswith(REPLACEMENT):
            context, context_text = [], ""
        self._window = context
        self._num_read = len(context)  # so many of the window are out
        self._read_text = context_text

    def add(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._read_text):
            return ""
        piece = text[len(self._read_text) :]
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self._decoder.decode(self._window)
        return piece

    def hold(self, token_id: int) -> None:
        """Take a token whose text is not wanted before ``flush``: that is one decode for all."""
        if token_id not in self._skipped:
            self._window.append(token_id)

    def flush(self) -> str:
        """What is still held back: the tokens have ended, so nothing can complete it."""
        text = self._decoder.decode(self._window)
        piece = text[len(self._read_text) :]
        self._num_read = len(self._window)
        self._read_text = text
        return piece
