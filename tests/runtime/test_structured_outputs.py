"""Guided decoding: the text is in the language, the tokens are those that the model likes best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.grammars import MAX_KEPT, Grammars
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import CompletionOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.structured_outputs import StructuredOutputsParams
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.test_llm import greedy, mix, prompts
from tests.runtime.toy_artifact import EOS, VOCAB_SIZE, byte_tokenizer, write_toy_artifact

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ['a"b\\c\n', "ü😀 x", "-[#&~]", "yes", "yesterday"]
ARITHMETIC = 'root ::= term ("+" term){0,3}\nterm ::= [0-9] | "(" root ")"'


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    kinds = {"name": str, "age": int, "tags": list, "ok": bool}
    return (
        {"name", "age", "tags"} <= set(value) <= set(kinds)
        and all(type(each) is kinds[key] for key, each in value.items())
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b", None}
    )


def is_arithmetic(text: str) -> bool:
    return re.fullmatch(r"[0-9+()]+", text) is not None and isinstance(eval(text), int)


LANGUAGES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA}, follows_schema),
    "json as text, compact": (
        {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
        lambda text: follows_schema(text) and " " not in re.sub('"[^"]*"', "", text),
    ),
    "json with one space": (
        {"json": {"type": "array", "items": {"const": 1}, "maxItems": 3, "minItems": 2}}
        | {"whitespace_pattern": " "},
        re.compile(r"\[ ?1 ?, ?1( ?, ?1)? ?\]").fullmatch,
    ),
    "regex": ({"regex": r"[a-f]{2,5}-(\d{3}|x)"}, re.compile(r"[a-f]{2,5}-(\d{3}|x)").fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": ARITHMETIC}, is_arithmetic),
    "lark": (
        {"grammar": 'start: greeting " " NAME\ngreeting: "hi" | "ho"\nNAME: /[A-Z][a-z]{1,4}/'},
        re.compile("h[io] [A-Z][a-z]{1,4}").fullmatch,
    ),
}


def guided(structure: dict[str, Any], **more: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"max_tokens": 400, "seed": 0}
    return SamplingParams(structured_outputs=structure, **{**defaults, **more})


def complete(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> CompletionOutput:
    return llm.generate([prompt or [1]], params)[0].outputs[0]


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_text_is_in_the_language(llm: LLM, name: str) -> None:
    structure, is_right = LANGUAGES[name]
    params = [guided(structure, seed=seed, temperature=2.0) for seed in range(10)]
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([*prompts()[:10], [1]], [*params, free])
    for output in outputs[:10]:
        [completion] = output.outputs
        assert completion.finish_reason == "stop", completion
        assert completion.stop_reason is None
        assert is_right(completion.text), completion.text
    assert outputs[10].outputs[0].token_ids == greedy([1], 30)
    assert len({output.outputs[0].text for output in outputs[:10]}) > 1


def test_the_tokens_are_the_best_that_are_allowed(llm: LLM) -> None:
    """Against a search over the choices as token sequences, without any grammar."""
    texts = ["abc", "abd", "xy", "x"]
    encode = llm.get_tokenizer().encode
    allowed = [tuple(encode(text, add_special_tokens=False)) for text in texts]
    allowed = [(*ids, EOS) if ids == allowed[3] else ids for ids in allowed]
    for prompt in prompts()[:8]:
        found: tuple[int, ...] = ()
        while found not in allowed:
            row = mix([*prompt, *found])
            following = [ids[len(found)] for ids in allowed if ids[: len(found)] == found]
            found = (*found, max(following, key=lambda i, r=row: r[i].item()))  # type: ignore[misc]
        output = complete(llm, guided({"choice": texts}, temperature=0.0), prompt)
        assert tuple(output.token_ids) == found


def test_the_end_is_allowed_only_where_the_grammar_accepts(llm: LLM) -> None:
    """The model is pushed to its end: it comes at the first moment that it may."""
    push = {EOS: 100.0}
    output = complete(llm, guided({"regex": "(ab){2,9}"}, logit_bias=push))
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("abab", EOS, "stop")
    pull = {EOS: -100.0}
    output = complete(llm, guided({"regex": "(ab){2,4}"}, logit_bias=pull))
    assert (output.text, EOS in output.token_ids) == ("abababab", False)


def test_white_space_does_not_go_on_for_ever(llm: LLM) -> None:
    [space] = llm.get_tokenizer().encode(" ", add_special_tokens=False)
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    output = complete(llm, guided({"json": schema}, logit_bias={space: 100.0}))
    assert json.loads(output.text) == [1, 1]
    assert output.text.count(" ") == 4 * 64


def test_a_whole_text_ends_though_the_end_of_sequence_is_ignored(llm: LLM) -> None:
    params = guided({"choice": ["yes", "no"]}, ignore_eos=True, min_tokens=50)
    assert complete(llm, params).text in ("yes", "no")
    assert complete(llm, params).finish_reason == "stop"
    params = guided({"regex": "a+"}, ignore_eos=True, logit_bias={EOS: 100.0})
    assert complete(llm, params).text == "a"


def test_min_tokens_holds_back_the_end(llm: LLM) -> None:
    params = guided({"regex": "a{2,9}"}, logit_bias={EOS: 100.0}, min_tokens=6)
    assert complete(llm, params).text == "aaaaaa"


def test_other_rules_hold_beside_a_grammar(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    digits = encode("0123456789", add_special_tokens=False)
    params = guided({"regex": "[0-9]{5}"}, allowed_token_ids=digits[3:6], bad_words=["4"])
    assert set(complete(llm, params).text) <= {"3", "5"}
    stopped = guided({"regex": "[0-9]{5}x"}, stop=["x"], include_stop_str_in_output=True)
    output = complete(llm, stopped)
    assert re.fullmatch("[0-9]{5}x", output.text)
    assert output.stop_reason == "x"


def test_a_grammar_and_rules_that_leave_nothing_end_their_request_alone(llm: LLM) -> None:
    first = llm.get_tokenizer().encode("y", add_special_tokens=False)
    bad = guided({"choice": ["yes"]}, allowed_token_ids=first)
    good = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    failed, output = llm.generate([[1], [1]], [bad, good])
    assert "no token is left to choose" in str(failed.outputs[0].stop_reason)
    assert output.outputs[0].token_ids == greedy([1], 9)
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_a_grammar_that_fails_in_the_middle_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.runtime.grammars import EngineError, Guide

    real = Guide.mask

    def mask(self: Guide) -> Any:
        found = real(self)
        calls.append(self)
        if calls.count(self) == 3 and self is calls[0]:
            raise EngineError("structured_outputs: too much")
        return found

    calls: list[Guide] = []
    monkeypatch.setattr(Guide, "mask", mask)
    structure = {"regex": "[ab]{8}"}
    failed, fine = llm.generate([[1], [2]], [guided(structure), guided(structure)])
    assert failed.outputs[0].finish_reason == "error"
    assert "too much" in str(failed.outputs[0].stop_reason)
    assert re.fullmatch("[ab]{8}", fine.outputs[0].text)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "objct"}}, "Invalid type: objct"),
        ({"json": {"$ref": "#/definitions/x"}}, "'/definitions/x' does not exist"),
        ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable schema"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'start: "a" x'}, 'unknown name: "x"'),
        ({"grammar": 'root ::= ["a"'}, "Failed to convert the grammar"),
        ({"grammar": "root ::= x"}, "Rule 'x' not found"),
        ({"json": {"const": "\ud800"}}, "unexpected end of hex escape"),
        ({"json": nested(200)}, "recursion limit exceeded"),
        ({"regex": "(" * 9999 + ")" * 9999}, "invalid regex"),
        ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "too deeply nested"),
        ({"grammar": "root ::= " + "(" * 9999 + '"a"' + ")" * 9999}, "recursion depth"),
        ({"regex": r"[^\s\S]"}, "no text can be like this"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    llm: LLM, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        llm.generate([[1], [2]], [SamplingParams(), guided(structure)])
    assert str(caught.value).startswith("structured_outputs: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert llm.stats().num_steps == 0


def test_a_model_without_a_tokenizer(shared_toy: Path) -> None:
    llm = LLM(shared_toy, skip_tokenizer_init=True)
    with pytest.raises(InvalidRequest, match="structured_outputs need a tokenizer"):
        llm.generate([[1]], guided({"regex": "a"}))


def test_a_model_without_an_end_of_sequence(tmp_path: Path) -> None:
    write_toy_artifact(tmp_path / "a", generation_config={"eos_token_id": []})
    llm = LLM(tmp_path / "a")
    assert complete(llm, guided({"choice": ["yes", "no"]})).text in ("yes", "no")
    assert complete(llm, guided({"regex": "(ab){1,3}"})).text in ("ab", "abab", "ababab")


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_preempted_text_goes_on_where_it_was(shared_toy: Path, overlap: bool) -> None:
    params = [
        guided(LANGUAGES[name][0], seed=i, max_tokens=40)
        for i, name in enumerate([*LANGUAGES, *LANGUAGES][:12])
    ]
    alone = LLM(shared_toy)
    expected = [alone.generate([p], q)[0].outputs for p, q in zip(prompts(), params, strict=True)]
    tight = LLM(shared_toy, num_gpu_blocks_override=17, block_size=8, async_scheduling=overlap)
    assert [output.outputs for output in tight.generate(prompts(), params)] == expected
    assert tight.stats().num_preemptions > 0


def test_samples_of_a_prompt_walk_by_themselves(llm: LLM) -> None:
    [output] = llm.generate([[1]], guided({"regex": "[a-z]{6}"}, n=5))
    texts = [each.text for each in output.outputs]
    assert len(set(texts)) == 5
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)


def grammars(**more: Any) -> Grammars:
    defaults: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}
    return Grammars(Tokenizer(byte_tokenizer(), {}, {}), **{**defaults, **more})


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = Grammars._compile

    def count(self: Grammars, grammar: str) -> Any:
        compiled.append(grammar)
        return real(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", count)
    cache = grammars()
    first = cache.guide(StructuredOutputsParams(regex="ab"))
    first.append(byte_tokenizer().encode("a", add_special_tokens=False).ids[0])
    second = cache.guide(StructuredOutputsParams(regex="ab"))
    assert len(compiled) == 1
    assert not first.is_complete
    assert first.mask().tolist() != second.mask().tolist(), "a walk of its own"
    for number in range(MAX_KEPT):
        cache.guide(StructuredOutputsParams(regex=f"{number}"))
    cache.guide(StructuredOutputsParams(regex="ab"))
    assert len(compiled) == MAX_KEPT + 2, "the least recently used was forgotten"


@pytest.mark.parametrize("vocab_size", [200, 256, 260, 321])
def test_a_vocabulary_may_differ_from_the_tokenizers(vocab_size: int) -> None:
    guide = grammars(vocab_size=vocab_size, eos_token_ids=[]).guide(
        StructuredOutputsParams(regex="a|b")
    )
    mask = guide.mask()
    assert len(mask) == -(-vocab_size // 32)
    encode = byte_tokenizer().encode
    wanted = {encode(text, add_special_tokens=False).ids[0] for text in "ab"}
    allowed = {i for i in range(vocab_size) if mask[i // 32] >> (i % 32) & 1}
    assert allowed == wanted
