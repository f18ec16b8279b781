"""Every shape of a prompt, and every wrong one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.prompts import Prompt, fit_prompts, parse_prompts
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.toy_artifact import BOS, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), {}, {})
HI = Prompt((BOS, *TOKENIZER.encode("Hi", add_special_tokens=False)), "Hi")


def parse(prompts: Any, keep: int | None = None, **options: Any) -> list[Prompt]:
    parsed = parse_prompts(prompts, **{"tokenizer": TOKENIZER, "vocab_size": 260, **options})
    return fit_prompts(parsed, [keep] * len(parsed), tokenizer=TOKENIZER, max_model_len=10)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hi", [HI]),
        (["Hi", "Hi"], [HI, HI]),
        ([1, 2], [Prompt((1, 2))]),
        ((1, 2), [Prompt((1, 2))]),
        ([[1, 2], [3]], [Prompt((1, 2)), Prompt((3,))]),
        ({"prompt": "Hi"}, [HI]),
        ({"prompt_token_ids": [1, 2]}, [Prompt((1, 2))]),
        ({"prompt_token_ids": [1, 2], "prompt": "text"}, [Prompt((1, 2), "text")]),
        (["Hi", [1], {"prompt": "Hi"}], [HI, Prompt((1,)), HI]),
        ({"prompt_token_ids": [1], "cache_salt": "a"}, [Prompt((1,), None, "a")]),
        ({"prompt": "Hi", "cache_salt": "a"}, [Prompt(HI.token_ids, "Hi", "a")]),
        (np.array([1, 2]), [Prompt((1, 2))]),
        ([np.int64(1), 2], [Prompt((1, 2))]),
        ([torch.tensor([1, 2])], [Prompt((1, 2))]),
        ([259], [Prompt((259,))]),
        ([0] * 9, [Prompt((0,) * 9)]),
    ],
)
def test_shapes(prompts: Any, expected: list[Prompt]) -> None:
    assert parse(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        (["Hi", ""], "prompt 1 is empty"),
        ([], "there is no prompt"),
        ([[]], "the prompt is empty; give at least one token"),
        ({"prompt_token_ids": []}, "at least one token"),
        ({}, "neither a prompt string nor"),
        ({"prompt": None}, "neither a prompt string nor"),
        ({"prompt": "x", "multi_modal_data": 1}, "'multi_modal_data' is not supported"),
        ([-1], "token id -1 is not in the vocabulary of 260"),
        ([1, 260], "token id 260 is not in the vocabulary"),
        ([2**63], "token id 9223372036854775808 is not"),
        ([1.0], "a token id must be an integer, got 1.0"),
        ([True], "a token id must be an integer, got True"),
        ([[1, "a"]], "a token id must be an integer, got 'a'"),
        ([[1, None]], "a token id must be an integer"),
        ({"prompt_token_ids": "12"}, "token ids must be a list, got str"),
        (None, "a prompt must be a string"),
        (5, "a prompt must be a string"),
        ([b"x"], "must be a string"),
        ("\ud800", "not valid Unicode"),
        ([0] * 10, "10 tokens, which leaves no room .* max_model_len=10; shorten it to 9"),
        (["Hi", [0] * 11], "prompt 1 has 11 tokens"),
    ],
)
def test_what_is_no_prompt(prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(prompts)


def test_text_without_a_tokenizer() -> None:
    assert parse([1], tokenizer=None) == [Prompt((1,))]
    with pytest.raises(InvalidRequest, match="without a tokenizer; give token ids"):
        parse("Hi", tokenizer=None)


def test_special_tokens_are_left_out_when_the_text_holds_them() -> None:
    assert parse("<s>Hi", add_special_tokens=False)[0].token_ids == HI.token_ids


@pytest.mark.parametrize(
    ("prompt", "keep", "expected"),
    [
        ([1, 2, 3], 2, Prompt((2, 3))),
        ([1, 2, 3], 3, Prompt((1, 2, 3))),
        ([1, 2, 3], 99, Prompt((1, 2, 3))),
        ([*range(100)], 9, Prompt(tuple(range(91, 100)))),
        ("Hi", 1, Prompt(HI.token_ids[-1:], "i")),
        ("Hi", 3, HI),
        ({"prompt_token_ids": [1, 2], "cache_salt": "a"}, 1, Prompt((2,), None, "a")),
    ],
)
def test_the_last_tokens_of_a_prompt(prompt: Any, keep: int, expected: Prompt) -> None:
    assert parse(prompt, keep) == [expected]


def test_a_prompt_that_is_too_long_even_when_cut() -> None:
    with pytest.raises(InvalidRequest, match="has 10 tokens, which leaves no room"):
        parse([0] * 20, 10)
