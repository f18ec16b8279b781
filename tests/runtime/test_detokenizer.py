"""Pieces against the whole: characters over several tokens, leading spaces, special tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from octavo.runtime.detokenizer import IncrementalDetokenizer
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.toy_artifact import EOS, IM_END, byte_tokenizer

TEXTS = [
    "plain words",
    "你好，世界。再见",  # noqa: RUF001
    "🙂🏽👩‍👩‍👧 ok 🇨🇭",
    "mixed é ñ ü ß İ \t\n  spaces  ",
    "אבג مرحبا हिन्दी",
    "a",
]


def byte_level() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, {})


def sentencepiece() -> Tokenizer:
    """As Llama 2's: spaces as U+2581, bytes where a piece is missing, the first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁w", "▁wo", "好"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(
        models.BPE(vocab, [("▁", "w"), ("▁w", "o")], unk_token="<unk>", byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>"}, {})


def pieces_of(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_whole(make: type[Tokenizer], text: str) -> None:
    tokenizer = make()  # type: ignore[call-arg]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_half_a_character_at_the_end_is_flushed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_random_bytes_come_out_as_the_whole() -> None:
    tokenizer = byte_level()
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(260) for _ in range(rng.randint(1, 40))]
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces_of(tokenizer, ids, skip=skip)) == whole


def test_text_continues_its_prompt() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    prompt, rest = ids[:6], ids[6:]
    assert tokenizer.decode(prompt) == "hello"
    assert "".join(pieces_of(tokenizer, rest, prompt)) == " world"
    assert "".join(pieces_of(tokenizer, rest)) == "world"


def test_a_special_token_between_words_keeps_their_space() -> None:
    tokenizer = sentencepiece()
    word = tokenizer.encode("wo", add_special_tokens=False)
    ids = [*word, 2, 2, *word]
    assert "".join(pieces_of(tokenizer, ids)) == "wo wo" == tokenizer.decode(ids, True)


def test_a_prompt_that_ends_within_a_character_is_left_out() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("好ab", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids[2:], ids[:2])) == tokenizer.decode(ids[2:])


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|im_end|>b</s>")])
def test_special_tokens_show_when_asked(skip: bool, expected: str) -> None:
    tokenizer = byte_level()
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, [a, IM_END, b, EOS], skip=skip)) == expected
