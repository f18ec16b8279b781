"""Beam search against transformers' own, over small models that end often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from model_zoo import tiny_model

from octavo.runtime.beam_search import BeamSearch, BeamSearchParams, search
from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import Logprob
from tests.runtime.test_llm import mix
from tests.runtime.toy_artifact import EOS, VOCAB_SIZE

PROMPTS = [[5, 6, 7], [200], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", seed=3)


def next_logprobs(model: Any, contexts: list[list[int]], count: int) -> list[dict[int, Logprob]]:
    found = []
    for context in contexts:
        with torch.inference_mode():
            row = model(input_ids=torch.tensor([context])).logits[0, -1].log_softmax(-1)
        best = row.topk(count)
        values = map(Logprob, best.values.tolist())
        found.append(dict(zip(best.indices.tolist(), values, strict=True)))
    return found


def ends(num_ends: int) -> list[int]:
    """So many ids that the model likes to write count as the end of sequence."""
    return list(range(num_ends)) if num_ends else []


@pytest.mark.parametrize("num_ends", [0, 25])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_beams_are_those_of_transformers(
    model: Any, width: int, length_penalty: float, num_ends: int
) -> None:
    params = BeamSearchParams(width, 9, length_penalty=length_penalty)
    searches = [
        BeamSearch(prompt, params, eos_token_ids=ends(num_ends), max_model_len=256)
        for prompt in PROMPTS
    ]
    search(searches, lambda contexts, count: next_logprobs(model, contexts, count))
    lengths = set()
    for prompt, each in zip(PROMPTS, searches, strict=True):
        if width == 1:
            expected, scores = greedy_of(model, prompt, ends(num_ends), length_penalty)
        else:
            expected, scores = beams_of(model, prompt, ends(num_ends), width, length_penalty)
        beams = each.best().sequences
        assert [beam.tokens for beam in beams] == expected
        for beam, score in zip(beams, scores, strict=True):
            length = len(beam.tokens) - len(prompt)
            assert beam.cum_logprob / length**length_penalty == pytest.approx(score, abs=1e-4)
            assert len(beam.logprobs) == length
            chosen = zip(beam.tokens[len(prompt) :], beam.logprobs, strict=True)
            total = sum(entry[token].logprob for token, entry in chosen)
            assert beam.cum_logprob == pytest.approx(total)
            is_end = beam.tokens[-1] in ends(num_ends)
            assert beam.finish_reason == ("stop" if is_end else "length")
            assert beam.stop_reason == (beam.tokens[-1] if is_end else None)
            lengths.add(length)
    if num_ends == 25 and length_penalty == 1.0:
        assert len(lengths) > 1, "some end and some do not, to be a test"


def test_enough_go_on_when_most_of_the_best_end() -> None:
    """Four ends are the likeliest after everything, then 4, 5 and 6: two beams are to be found."""
    values = (-1.0, -1.1, -1.2, -1.3, -2.0, -2.5, -3.0)
    asked: list[int] = []

    def fixed(contexts: list[list[int]], count: int) -> list[dict[int, Logprob]]:
        asked.append(count)
        return [dict(enumerate(map(Logprob, values[:count]))) for _ in contexts]

    one = BeamSearch([9], BeamSearchParams(2, 5), eos_token_ids=[0, 1, 2, 3], max_model_len=99)
    one.extend(fixed([[9]], one.num_candidates))
    assert [beam.tokens for beam in one.running] == [[9, 4], [9, 5]]
    assert [beam.tokens for beam in one.best().sequences] == [[9, 0], [9, 1]]
    assert one.is_finished, "-2 a token is worse than the -1.1 of the second that has ended"


def beams_of(
    model: Any, prompt: list[int], eos: list[int], width: int, length_penalty: float
) -> tuple[list[list[int]], list[float]]:
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=9,
        do_sample=False,
        length_penalty=length_penalty,
        eos_token_id=eos or None,
        pad_token_id=255,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [without_padding(ids, len(prompt), eos) for ids in output.sequences.tolist()]
    return sequences, output.sequences_scores.tolist()


def without_padding(ids: list[int], prompt_length: int, eos: list[int]) -> list[int]:
    for place in range(prompt_length, len(ids)):
        if ids[place] in eos:
            return ids[: place + 1]
    return ids


def greedy_of(
    model: Any, prompt: list[int], eos: list[int], length_penalty: float
) -> tuple[list[list[int]], list[float]]:
    """One beam is not greedy: it goes on with the second best when the best one ends."""
    tokens, total = list(prompt), 0.0
    ended: tuple[float, list[int]] | None = None
    for length in range(1, 10):
        [entry] = next_logprobs(model, [tokens], 256)
        best, *others = entry
        if best in eos or length == 9:
            score = (total + entry[best].logprob) / length**length_penalty
            if ended is None or score > ended[0]:
                ended = score, [*tokens, best]
        keep = next(each for each in (best, *others) if each not in eos)
        tokens, total = [*tokens, keep], total + entry[keep].logprob
        if ended is not None and total / length**length_penalty <= ended[0]:
            break
    assert ended is not None
    return [ended[1]], [ended[0]]


def toy_search(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    def toy(contexts: list[list[int]], count: int) -> Sequence[Mapping[int, Logprob]]:
        rows = [mix(context).log_softmax(-1).tolist() for context in contexts]
        return [dict(enumerate(map(Logprob, row))) for row in rows]

    one = BeamSearch(prompt, params, eos_token_ids=[EOS], max_model_len=512)
    search([one], toy)
    return [(beam.tokens, beam.cum_logprob) for beam in one.best().sequences]


@pytest.mark.parametrize("params", [BeamSearchParams(3, 8), BeamSearchParams(2, 8, True)], ids=str)
def test_the_engine_gives_the_search_its_numbers(llm: LLM, params: BeamSearchParams) -> None:
    prompts: list[Any] = [[1, 2], {"prompt_token_ids": [7]}, "Hi"]
    outputs = llm.beam_search(prompts, params)
    ids = [[1, 2], [7], llm.get_tokenizer().encode("Hi")]
    for prompt, output in zip(ids, outputs, strict=True):
        expected = toy_search(prompt, params)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (_, cum_logprob) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(cum_logprob, abs=1e-4)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_free_blocks == llm.stats().num_total_blocks
    assert llm.last_stats.output_tokens > 0


def test_text_without_the_end_unless_it_is_wanted(llm: LLM) -> None:
    for start in range(60):
        params = BeamSearchParams(4, 12)
        [plain] = llm.beam_search([[start]], params)
        stopped = [i for i, beam in enumerate(plain.sequences) if beam.finish_reason == "stop"]
        if not stopped:
            continue
        params.include_stop_str_in_output = True
        [whole] = llm.beam_search([[start]], params)
        beam, text = plain.sequences[stopped[0]], whole.sequences[stopped[0]].text
        assert beam.stop_reason == beam.tokens[-1] == EOS
        assert text == f"{beam.text}</s>" == llm.get_tokenizer().decode(beam.tokens)
        return
    raise AssertionError("no beam ended")


def test_the_models_maximum_ends_it(shared_toy: Any) -> None:
    llm = LLM(shared_toy, max_model_len=10)
    [output] = llm.beam_search([[1] * 7], BeamSearchParams(2, 50))
    assert {len(beam.tokens) for beam in output.sequences} <= {8, 9, 10}
    assert output.sequences[0].finish_reason in ("length", "stop")


def test_without_a_tokenizer_there_is_no_text(shared_toy: Any) -> None:
    llm = LLM(shared_toy, skip_tokenizer_init=True)
    [output] = llm.beam_search([[1]], BeamSearchParams(2, 3))
    assert [beam.text for beam in output.sequences] == [None, None]


def test_logits_that_are_not_finite_end_the_search(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = llm.engine.executor.execute  # type: ignore[attr-defined]
    monkeypatch.setattr(llm.engine.executor, "execute", lambda batch: real(batch) * math.nan)
    with pytest.raises(EngineError, match="not finite"):
        llm.beam_search([[1]], BeamSearchParams(2, 3))
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"beam_width": 2.0}, "beam_width must be an integer"),
        ({"beam_width": 10**6}, "beam_width must be at most 1024"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 0.5}, "leave temperature at 0"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"length_penalty": math.inf}, "length_penalty must be finite"),
        ({"length_penalty": 11.0}, "length_penalty must be at most 10"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **params})


def test_bad_prompts_and_parameters_run_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="must be BeamSearchParams"):
        llm.beam_search([[1]], {"beam_width": 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="token id"):
        llm.beam_search([[1], [VOCAB_SIZE]], BeamSearchParams(2, 4))
    assert llm.stats().num_steps == 0
