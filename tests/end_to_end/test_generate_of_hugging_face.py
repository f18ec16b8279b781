"""The same options give what transformers' own ``generate`` gives, on a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, BeamSearchParams, SamplingParams
from tests.runtime.toy_artifact import BOS, EOS

PROMPTS = [[BOS, 5, 6, 7, 5, 6], [BOS, 200], [BOS, *range(40, 90)]]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> LLM:
    return LLM(tiny_artifact)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


def generate(model: Any, prompt: list[int], **options: Any) -> Any:
    return model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"sequence_bias": [[[65], 9.0], [[66], 8.0]]}, {"logit_bias": {65: 9.0, 66: 8.0}}),
        ({"suppress_tokens": list(range(100))}, {"allowed_token_ids": list(range(100, 260))}),
        ({"min_new_tokens": 20}, {"min_tokens": 20}),
        (
            {"repetition_penalty": 1.2, "sequence_bias": [[[EOS], 4.0]]},
            {"logits_processors": [lambda _, logits: logits], "repetition_penalty": 1.2}
            | {"logit_bias": {EOS: 4.0}},
        ),
    ],
    ids=["repetition", "bias", "allowed", "minimum", "processor"],
)
def test_greedy_tokens(llm: LLM, model: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **ours)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = generate(model, prompt, **theirs).sequences[0, len(prompt) :].tolist()
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("width", [2, 5])
def test_beams_and_their_scores(llm: LLM, model: Any, width: int) -> None:
    found = llm.beam_search(PROMPTS, BeamSearchParams(width, NUM_TOKENS))
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = generate(
            model, prompt, num_beams=width, num_return_sequences=width, output_scores=True
        )
        rows = zip(
            output.sequences, expected.sequences, expected.sequences_scores.tolist(), strict=True
        )
        for beam, tokens, score in rows:
            assert beam.tokens == tokens[: len(beam.tokens)].tolist()
            assert not tokens[len(beam.tokens) :].any(), "padding"
            length = len(beam.tokens) - len(prompt)
            assert beam.cum_logprob / length == pytest.approx(score, abs=1e-4)


def test_log_probabilities_of_the_prompt(tiny_artifact: Path, model: Any) -> None:
    """In one chunk and in many; the longest prompt has more tokens than a step has rows."""
    params = SamplingParams(prompt_logprobs=3, max_tokens=1)
    for options in ({}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 7}):
        llm = LLM(tiny_artifact, **options)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            with torch.inference_mode():
                rows = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            for place, entry in enumerate(output.prompt_logprobs[1:]):
                assert entry is not None
                assert {*rows[place].topk(3).indices.tolist(), prompt[place + 1]} == set(entry)
                for token_id, logprob in entry.items():
                    expected = float(rows[place, token_id])
                    assert logprob.logprob == pytest.approx(expected, abs=2e-4)
