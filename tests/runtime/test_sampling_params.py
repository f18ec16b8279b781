"""Nonsense is refused with one clear line; what is not built is never ignored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.ir.errors import OctavoError
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.structured_outputs import GuidedDecodingParams

BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", "1", "a number"),
    ("temperature", True, "a number"),
    ("temperature", None, "a number"),
    ("top_p", 0.0, "above 0"),
    ("top_p", -1.0, "above 0"),
    ("top_p", 1.01, "at most 1"),
    ("top_p", math.nan, "finite"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "an integer"),
    ("top_k", True, "an integer"),
    ("min_p", -0.1, "at least 0"),
    ("min_p", 1.1, "at most 1"),
    ("seed", 1.0, "an integer"),
    ("seed", 2**64, "at most"),
    ("seed", -(2**63) - 1, "at least"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "at least 1"),
    ("max_tokens", 2.0, "an integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "must not exceed max_tokens=16"),
    ("logprobs", -2, "at least -1"),
    ("logprobs", True, "an integer"),
    ("stop", "", "empty string"),
    ("stop", ["a", ""], "empty string"),
    ("stop", [1], "a string or a list"),
    ("stop", 1, "a string or a list"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", [True], "an integer"),
    ("stop_token_ids", "12", "a list of integers"),
    ("stop_token_ids", 12, "a list of integers"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("n", 1.5, "an integer"),
    ("n", True, "an integer"),
    ("n", 0, "at least 1"),
    ("n", 16385, "at most 16384"),
    ("best_of", 0, "at least 1"),
    ("best_of", "2", "an integer"),
    ("repetition_penalty", math.nan, "finite"),
    ("repetition_penalty", 0.0, "above 0"),
    ("repetition_penalty", "1", "a number"),
    ("presence_penalty", 2.1, "at most 2"),
    ("presence_penalty", True, "a number"),
    ("frequency_penalty", -2.1, "at least -2"),
    ("frequency_penalty", 10**400, "finite"),
    ("typical_p", 0.0, "above 0"),
    ("typical_p", 1.1, "at most 1"),
    ("prompt_logprobs", -2, "at least -1"),
    ("prompt_logprobs", False, "an integer"),
    ("logit_bias", [1], "a dict"),
    ("logit_bias", {1: "2"}, "a number"),
    ("logit_bias", {1: math.inf}, "finite"),
    ("logit_bias", {1.0: 2.0}, "an integer"),
    ("logit_bias", {True: 2.0}, "an integer"),
    ("logit_bias", {-1: 2.0}, "at least 0"),
    ("logit_bias", {"-1": 2.0}, "an integer"),
    ("logit_bias", {"1" * 5000: 2.0}, "an integer"),
    ("bad_words", [""], "empty string"),
    ("bad_words", [["a"]], "a list of strings"),
    ("bad_words", ["a", "\udfff"], "not valid Unicode"),
    ("stop", "\ud800", "not valid Unicode"),
    ("allowed_token_ids", [], "allows nothing"),
    ("allowed_token_ids", [1, -1], "at least 0"),
    ("allowed_token_ids", [1, 2.0], "an integer"),
    ("allowed_token_ids", [False], "an integer"),
    ("allowed_token_ids", "12", "a list of integers"),
    ("logits_processors", ["x"], "callables"),
    ("logits_processors", print, "callables"),
    ("structured_outputs", object(), "StructuredOutputsParams or a dict"),
    ("structured_outputs", {"jsn": {}}, "'jsn' is not one of"),
    ("structured_outputs", {}, "exactly one of"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ("structured_outputs", {"json_object": False}, "got none"),
    ("structured_outputs", {"json_object": "yes"}, "True or False"),
    ("structured_outputs", {"json": "{"}, "json is not valid JSON"),
    ("structured_outputs", {"json": "[1]"}, "must be a JSON schema, an object"),
    ("structured_outputs", {"json": True}, "must be a JSON schema, an object"),
    ("structured_outputs", {"json": {"enum": [object()]}}, "is not a JSON schema"),
    ("structured_outputs", {"json": {"const": math.nan}}, "is not a JSON schema"),
    ("structured_outputs", {"json": "[" * 10**6}, "json is not valid JSON"),
    ("structured_outputs", {"regex": "\ud800"}, "not valid Unicode"),
    ("structured_outputs", {"choice": ["\ud800"]}, "not valid Unicode"),
    ("structured_outputs", {"grammar": "\ud800"}, "not valid Unicode"),
    ("structured_outputs", {"choice": []}, "lists nothing"),
    ("structured_outputs", {"choice": "ab"}, "a list of strings"),
    ("structured_outputs", {"choice": ["a", 1]}, "a list of strings"),
    ("structured_outputs", {"choice": [""]}, "an empty string"),
    ("structured_outputs", {"regex": 5}, "regex must be a non-empty string"),
    ("structured_outputs", {"grammar": ""}, "grammar must be a non-empty string"),
    ("structured_outputs", {"structural_tag": "x"}, "structural_tag is not supported"),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "is for json"),
    ("structured_outputs", {"json": {}, "disable_any_whitespace": 1}, "True or False"),
    ("guided_decoding", {}, "exactly one of"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("truncate_prompt_tokens", -1, "at least 1"),
    ("truncate_prompt_tokens", 2.5, "an integer"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_named_in_one_line(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    text = str(caught.value)
    assert name in text or name == "guided_decoding"  # it is read as the newer name
    assert message in text
    assert "\n" not in text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OctavoError)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": None, "bad_words": [], "logits_processors": []},
        {"top_k": -1},
        {"top_k": 0, "seed": -1},
        {"temperature": 0, "top_p": 1, "min_p": 0},
        {"max_tokens": None, "min_tokens": 100},
        {"typical_p": 1, "logit_bias": {}, "bad_words": None, "allowed_token_ids": None},
    ],
)
def test_values_that_change_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    params = SamplingParams(**neutral)
    assert params.top_k == 0
    assert params.seed is None


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), max_tokens=np.int32(3))
    assert (params.top_k, params.temperature, params.max_tokens) == (5, 0.5, 3)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="###").stop == ("###",)


def test_a_bias_is_by_number_and_within_bounds() -> None:
    params = SamplingParams(logit_bias={"12": 1, np.int64(3): -1000})
    assert params.logit_bias == {12: 1.0, 3: -100.0}


def test_the_older_name_of_structured_outputs() -> None:
    old = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"]))
    new = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert old == new
    assert replace(old) == new
    with pytest.raises(InvalidRequest, match="not both"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
