"""Penalties, bans and biases against transformers' own processors, over whole generations.

The reference is a loop over the toy model without a cache: its logits, transformers' processor for
the rule (or the definition, where transformers has none), and the best token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TypicalLogitsWarper,
)

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.logit_edits import apply_edits
from octavo.runtime.logit_rules import bad_word_ids
from octavo.runtime.sampler import SampleRow
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.test_llm import greedy, mix, prompts
from tests.runtime.toy_artifact import EOS, VOCAB_SIZE, byte_tokenizer, write_toy_artifact

# ``(prompt ids, output ids, logits) -> logits``
Rule = Callable[[list[int], list[int], Tensor], Tensor]

NUM_TOKENS = 40


def reference(prompt: list[int], rule: Rule, count: int = NUM_TOKENS) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output.append(int(rule(prompt, output, mix(prompt + output)).argmax()))
    return output


def of_transformers(processor: Any, *, with_prompt: bool = True) -> Rule:
    def rule(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen = torch.tensor([prompt * with_prompt + output], dtype=torch.int64)
        return processor(seen, logits[None])[0]  # type: ignore[no-any-return]

    return rule


def counted(frequency: float, presence: float) -> Rule:
    """OpenAI's definition: ``mu[j] - c[j] * frequency - (c[j] > 0) * presence``."""

    def rule(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        changed = logits.clone()
        for token, count in Counter(output).items():
            changed[token] -= count * frequency + presence
        return changed

    return rule


# Few enough that tokens come again: rules about repetition then have something to do. The byte
# tokenizer numbers the printable characters from "!", so that these are the letters b to k.
FEW = list(range(65, 75))
few = of_transformers(PrefixConstrainedLogitsProcessor(lambda *_: FEW, num_beams=1))


def among_few(rule: Rule) -> Rule:
    return lambda prompt, output, logits: rule(prompt, output, few(prompt, output, logits))


CASES: dict[str, tuple[dict[str, Any], Rule]] = {
    "allowed": ({"allowed_token_ids": FEW}, few),
    "repetition": (
        {"repetition_penalty": 1.8, "allowed_token_ids": FEW},
        among_few(of_transformers(RepetitionPenaltyLogitsProcessor(1.8))),
    ),
    "repetition below 1": (
        {"repetition_penalty": 0.7},
        of_transformers(RepetitionPenaltyLogitsProcessor(0.7)),
    ),
    "frequency": (
        {"frequency_penalty": 1.5, "allowed_token_ids": FEW},
        among_few(counted(1.5, 0.0)),
    ),
    "presence": ({"presence_penalty": 2.0, "allowed_token_ids": FEW}, among_few(counted(0.0, 2.0))),
    "rewards": (
        {"presence_penalty": -0.5, "frequency_penalty": -0.25},
        counted(-0.25, -0.5),
    ),
    "bias": (
        {"logit_bias": {65: 3.0, 66: 3.5, "67": -100}},
        of_transformers(SequenceBiasLogitsProcessor([[[65], 3.0], [[66], 3.5], [[67], -100.0]])),
    ),
    "a token as a bad word": (
        {"bad_words": ["b"], "allowed_token_ids": FEW},
        among_few(of_transformers(NoBadWordsLogitsProcessor([[65]]), with_prompt=False)),
    ),
    "a function of two": (
        {"logits_processors": [lambda output, logits: logits.roll(len(output))]},
        lambda prompt, output, logits: logits.roll(len(output)),
    ),
    "a function of three, in place": (
        {"logits_processors": [lambda prompt, output, logits: logits.mul_(-1).roll(prompt[0])]},
        lambda prompt, output, logits: -logits.roll(prompt[0]),
    ),
    "all in order": (
        {
            "logits_processors": [lambda output, logits: -logits],
            "allowed_token_ids": FEW,
            "logit_bias": {70: 2.0},
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
        },
        lambda prompt, output, logits: counted(0.5, 0.0)(
            prompt,
            output,
            of_transformers(RepetitionPenaltyLogitsProcessor(1.3))(
                prompt,
                output,
                of_transformers(SequenceBiasLogitsProcessor([[[70], 2.0]]))(
                    prompt, output, few(prompt, output, -logits)
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_reference(llm: LLM, name: str) -> None:
    params, rule = CASES[name]
    chosen = [prompts()[i] for i in (0, 3, 5)]
    ruled = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([*chosen, chosen[0]], [ruled, ruled, ruled, plain])
    for prompt, output in zip(chosen, outputs[:3], strict=True):
        assert output.outputs[0].token_ids == reference(prompt, rule)
    assert outputs[3].outputs[0].token_ids == greedy(chosen[0], NUM_TOKENS)
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_bad_words_of_several_tokens(llm: LLM) -> None:
    """Banned are pairs that the model wants to write; what the prompt ends with does not count."""
    prompt = [7, 66]
    params = {"allowed_token_ids": FEW, "temperature": 0.0, "max_tokens": NUM_TOKENS}
    free = llm.generate([prompt], SamplingParams(**params))[0].outputs[0].token_ids
    assert free == reference(prompt, few)
    ids = [free[0:2], free[9:11], free[20:22], free[3:6], [66, free[0]]]
    rule = of_transformers(NoBadWordsLogitsProcessor(ids), with_prompt=False)
    words = [llm.get_tokenizer().decode(each) for each in ids]
    [output] = llm.generate([prompt], SamplingParams(bad_words=words, **params))
    assert output.outputs[0].token_ids == reference(prompt, among_few(rule)) != free


def test_bad_words_are_spelled_as_in_a_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), {}, {})
    size = VOCAB_SIZE
    ids = {text: tuple(tokenizer.encode(text, False)) for text in ("ab", " ")}
    assert bad_word_ids(["ab", " ab"], tokenizer, size) == [ids["ab"]]
    assert bad_word_ids([" "], tokenizer, size) == [ids[" "]]


class Merging:
    """A tokenizer whose word after a space is a token of its own, as BPE has them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return {"word": [1, 2], " word": [3]}[text]


def test_a_bad_word_after_a_space_may_be_another_token() -> None:
    assert bad_word_ids(["word"], Merging(), 4) == [(1, 2), (3,)]


def test_a_word_that_the_model_cannot_write_is_not_looked_for() -> None:
    assert bad_word_ids(["word"], Merging(), 3) == [(1, 2)]


def test_an_end_beyond_the_vocabulary_touches_no_other_row(tmp_path: Path) -> None:
    """Bans lie in all rows laid end to end: -1 and 265 would be tokens of the neighbours."""
    neighbours = [-1, EOS, VOCAB_SIZE + 5]
    write_toy_artifact(tmp_path / "a", generation_config={"eos_token_id": neighbours})
    llm = LLM(tmp_path / "a")
    params = [SamplingParams(temperature=0.0, max_tokens=40, min_tokens=40) for _ in range(9)]
    outputs = llm.generate(prompts()[:9], params)
    ban = of_transformers(NoBadWordsLogitsProcessor([[EOS]]))
    for prompt, output in zip(prompts(), outputs, strict=False):
        assert output.outputs[0].token_ids == reference(prompt, ban)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("typical_p", [0.05, 0.5, 0.95])
def test_typical_tokens_are_those_of_transformers(temperature: float, typical_p: float) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 5:] = -torch.inf
    params = SamplingParams(temperature=temperature, typical_p=typical_p)
    rows = [SampleRow(params, 0, 0, 0), SampleRow(SamplingParams(), 0, 0, 0)] * 3
    changed = logits.clone()
    assert apply_edits(changed, rows, torch.from_numpy) == {}
    expected = TypicalLogitsWarper(typical_p)(None, logits[::2] / temperature)
    assert torch.equal(changed[::2].isfinite(), expected.isfinite())
    assert torch.equal(changed[1::2], logits[1::2])


def fails_at(place: int, what: Callable[[], Any]) -> Callable[[list[int], Tensor], Any]:
    return lambda output, logits: what() if len(output) == place else logits


def raises() -> None:
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (raises, "a logits processor raised ZeroDivisionError: no luck"),
        (lambda: None, r"must return \(260,\) logits, got NoneType"),
        (lambda: torch.zeros(3), r"must return \(260,\) logits, got \(3,\)"),
        (lambda: torch.full((260,), -torch.inf), "no token is left to choose"),
        (lambda: torch.full((260,), torch.nan), "no token is left to choose"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_ends_its_request_alone(
    llm: LLM, what: Callable[[], Any], message: str, temperature: float
) -> None:
    bad = SamplingParams(temperature=temperature, logits_processors=[fails_at(3, what)])
    good = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[1], [2], [3]], [good, bad, good])
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error"
    assert re.search(message, str(failed.stop_reason))
    assert len(failed.token_ids) == 3
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [greedy([1], 16), greedy([3], 16)]
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks


def test_rules_that_come_to_allow_nothing_end_their_request_alone(llm: LLM) -> None:
    """A bad word of two tokens forbids the second when the first is there."""
    [token_id] = llm.get_tokenizer().encode("b", add_special_tokens=False)
    bad = SamplingParams(allowed_token_ids=[token_id], bad_words=["bb"], temperature=0.0)
    good = SamplingParams(temperature=0.0, ignore_eos=True)
    failed, output = llm.generate([[1], [2]], [bad, good])
    assert failed.outputs[0].token_ids == [token_id]
    assert "no token is left to choose" in str(failed.outputs[0].stop_reason)
    assert output.outputs[0].token_ids == greedy([2], 16)


def test_rules_that_allow_nothing_are_refused(llm: LLM) -> None:
    bad = SamplingParams(allowed_token_ids=[65], bad_words=["b"], temperature=0.0)
    good = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
    num_steps = llm.stats().num_steps
    with pytest.raises(InvalidRequest, match="no token may come first"):
        llm.generate([[1], [2]], [good, bad])
    assert llm.stats().num_steps == num_steps
    assert llm.stats().num_waiting == 0
    assert llm.generate([[2]], good)[0].outputs[0].token_ids == greedy([2], 2)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_rules_hold_through_preemption_and_in_any_company(shared_toy: Path, overlap: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"seed": 2, "frequency_penalty": 1.0, "top_k": 30},
        {"seed": 3, "typical_p": 0.6},
        {"seed": 4},
        {"seed": 5, "logit_bias": {65: 5.0}, "min_tokens": 5},
        {"seed": 6, "presence_penalty": 1.0, "logprobs": 1},
    ]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True, **kinds[i % 6]) for i in range(12)
    ]
    alone = LLM(shared_toy)
    expected = [alone.generate([p], q)[0].outputs for p, q in zip(prompts(), params, strict=True)]
    tight = LLM(shared_toy, num_gpu_blocks_override=20, block_size=8, async_scheduling=overlap)
    assert [output.outputs for output in tight.generate(prompts(), params)] == expected
    assert tight.stats().num_preemptions > 0


def test_only_requests_whose_rules_need_it_wait_for_their_tokens(shared_toy: Path) -> None:
    """Beside one that overlaps, a request that waits is in every other step; alone, in each."""
    llm = LLM(shared_toy, async_scheduling=True)
    steps = []
    for rule in ({"logit_bias": {65: 1.0}}, {"repetition_penalty": 1.1}):
        before = llm.stats().num_steps
        both = [SamplingParams(max_tokens=20, ignore_eos=True, **each) for each in ({}, rule)]
        llm.generate([[1], [2]], both)
        steps.append(llm.stats().num_steps - before)
    assert steps == [20, 20 + 10]
