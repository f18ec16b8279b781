"""The device sampler on the CPU, its kernel in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.runtime.device_sampler import DeviceSampler, SampleInputs
from octavo.runtime.kernel import Workspace
from octavo.runtime.logit_edits import NOTHING_LEFT, LogitEdits
from octavo.runtime.logit_rules import token_mask
from octavo.runtime.sampler import SampledToken, SampleRow, sample
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.step_inputs import SampleTensors
from tests.rendered_kernel import rendered

VOCAB_SIZE = 300
MAX_ROWS = 24
FLOATS = partial(np.array, dtype=np.float32)


@pytest.fixture(scope="module")
def sampler() -> DeviceSampler:
    module: Any = rendered("sample", {"vocab_size": VOCAB_SIZE})
    tokens = torch.full((MAX_ROWS,), -1, dtype=torch.int64)
    return DeviceSampler(module, Workspace.allocate("cpu"), tokens)


def row(
    seed: int = 1, stream: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: Any
) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, stream, position, banned)


def normal(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB_SIZE, generator=generator) * 2


def on_device(inputs: SampleInputs) -> SampleTensors:
    columns = {name: torch.from_numpy(column) for name, column in vars(inputs).items()}
    return SampleTensors(**columns)


def step(
    sampler: DeviceSampler, logits: Tensor, rows: list[SampleRow], padded: int | None = None
) -> list[SampledToken]:
    """As the executor runs one; ``padded`` rows of logits, those past the real ones of NaN."""
    padded = padded or len(rows)
    wide = torch.full((padded, VOCAB_SIZE), torch.nan)
    wide[: len(rows)] = logits
    before = wide.clone()
    sampling = on_device(sampler.columns(rows, padded))
    sampler.sample(wide, sampling)
    pending = sampler.finish(wide, sampling, rows)
    kept = sampler.tokens[: len(rows)].tolist()
    sampler.tokens.fill_(-1)  # the next step's, before this one's are read
    result = pending.result()
    assert pending.result() is result
    assert [token.token_id for token in result] == kept
    assert torch.equal(wide.nan_to_num(), before.nan_to_num()), "the logits are only read"
    return result


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40},
    {"top_p": 0.9, "banned": (3, 299)},
    {"temperature": 1.5},
    {"min_p": 0.05, "logprobs": 3},
    {"banned": (5, 6), "temperature": 0.0, "logprobs": 0},
    {"temperature": 1e-7, "top_k": 1},
]


def mixed_rows(count: int) -> list[SampleRow]:
    return [row(seed=i, stream=i % 3, position=i, **KINDS[i % len(KINDS)]) for i in range(count)]


def test_columns_are_padded_with_greedy_rows() -> None:
    rows = [row(2**64 - 1, -5, 7, temperature=0.5, top_k=3), row(top_p=0.5, min_p=0.25)]
    inputs = SampleInputs.from_rows(rows, 3)
    assert inputs.temperature.tolist() == [0.5, 1.0, 0.0]
    assert inputs.top_k.tolist() == [3, 0, 0]
    assert inputs.top_p.tolist() == [1.0, 0.5, 1.0]
    assert inputs.min_p.tolist() == [0.0, 0.25, 0.0]
    assert inputs.seed.tolist() == [-1, 1, 0]
    assert inputs.stream.tolist() == [-5, 0, 0]
    assert inputs.position.tolist() == [7, 0, 0]
    kinds = [column.dtype for column in vars(inputs).values()]
    assert kinds == [np.float32, np.int32, np.float32, np.float32, np.int64, np.int64, np.int64]


def test_temperatures_that_mean_greedy_are_zero() -> None:
    assert SampleInputs.from_rows([row(temperature=1e-6)]).temperature.tolist() == [0.0]


def test_greedy_rows_and_their_logprobs_are_those_of_the_host(sampler: DeviceSampler) -> None:
    rows = [
        row(temperature=0.0, logprobs=5),
        row(temperature=0.0),
        row(temperature=0.0, banned=(7,), logprobs=-1),
        row(temperature=0.0, logprobs=0),
    ]
    logits = normal(4)
    logits[2, 7] = 99.0
    assert step(sampler, logits, rows, padded=8) == sample(logits, rows)


def test_filters_leave_what_they_leave_on_the_host(sampler: DeviceSampler) -> None:
    kinds: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"top_k": 1, "banned": (0, 1, 2)},
    ]
    rows = [row(position=i, **kind) for i, kind in enumerate(kinds * 3)]
    logits = normal(12)
    assert step(sampler, logits, rows) == sample(logits, rows)


def test_a_row_gets_the_same_token_in_any_company(sampler: DeviceSampler) -> None:
    rows, logits = mixed_rows(14), normal(14)
    together = step(sampler, logits, rows, padded=MAX_ROWS)
    alone = [step(sampler, logits[i : i + 1], [rows[i]])[0] for i in range(14)]
    assert together == alone


def test_banned_tokens_are_not_drawn_and_the_logits_stay(sampler: DeviceSampler) -> None:
    logits = torch.full((12, VOCAB_SIZE), -50.0)
    logits[:, [3, 4, 5]] = 1.0
    before = logits.clone()
    kinds: list[dict[str, Any]] = [{}, {"top_k": 2}, {"temperature": 0.0}]
    rows = [row(position=i, banned=(4, 5), **kinds[i % 3]) for i in range(12)]
    sampling = on_device(sampler.columns(rows, 12))
    found = sampler.finish(logits, sampling, rows).result()
    assert [token.token_id for token in found] == [3] * 12
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"temperature": 0.0}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(
    sampler: DeviceSampler, params: dict[str, Any]
) -> None:
    logits = normal(3)
    rows = [row(position=i, **params) for i in range(3)]
    want = step(sampler, logits, rows)
    logits[1, 200] = torch.nan
    first, second, third = step(sampler, logits, rows)
    assert second.error == "the model's logits are not finite"
    assert [first, third] == [want[0], want[2]]


def test_a_row_without_an_allowed_token_is_a_fault(sampler: DeviceSampler) -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 8] = 1.0
    [only] = step(sampler, logits, [row(banned=(8,))])
    assert only.error == NOTHING_LEFT


def spoil(logits: Tensor) -> Tensor:
    raise KeyError("who")


EDITS: list[LogitEdits] = [
    LogitEdits(allowed=token_mask([2, 299, 31, 32], VOCAB_SIZE)),
    LogitEdits(
        banned_token_ids=np.array([0, 299]), biased_token_ids=np.array([5]), bias=FLOATS([9.0])
    ),
    LogitEdits(
        penalized_token_ids=np.arange(300), penalties=FLOATS([3.0] * 300), repetition_penalty=1.7
    ),
    LogitEdits(processors=(lambda logits: -logits,), allowed=token_mask(range(100), VOCAB_SIZE)),
    LogitEdits(processors=(spoil,)),
]


@pytest.mark.parametrize("params", [{"temperature": 0.0, "logprobs": 2}, {"top_k": 1}], ids=str)
def test_edits_give_the_tokens_that_they_give_on_the_host(
    sampler: DeviceSampler, params: dict[str, Any]
) -> None:
    """Each kind alone between rows that have none, so that a misplaced edit is seen."""
    plain = [row(position=i, **params) for i in range(2 * len(EDITS))]
    rows = [each._replace(edits=EDITS[i // 2]) if i % 2 else each for i, each in enumerate(plain)]
    logits = normal(len(rows))
    found = step(sampler, logits, rows, padded=MAX_ROWS)
    assert found == sample(logits, rows)
    assert found[::2] == step(sampler, logits, plain)[::2]
    assert found[-1].error == "a logits processor raised KeyError: 'who'"
    assert [token.error for token in found[:-1]] == [None] * (len(rows) - 1)


def test_a_forced_token_is_taken_with_its_log_probability(sampler: DeviceSampler) -> None:
    plain = [row(position=i, temperature=0.0, logprobs=2) for i in range(5)]
    rows = [
        each._replace(forced_token_id=7 * i) if i in (1, 3) else each
        for i, each in enumerate(plain)
    ]
    logits = normal(5)
    found = step(sampler, logits, rows, padded=8)
    assert found == sample(logits, rows)
    expected = logits.log_softmax(-1)
    for i in (1, 3):
        assert found[i].token_id == 7 * i
        logprobs = found[i].logprobs
        assert logprobs is not None
        assert logprobs.chosen == pytest.approx(float(expected[i, 7 * i]), abs=1e-5)


def test_typical_rows_draw_what_is_typical(sampler: DeviceSampler) -> None:
    """One token of 0.6 and 299 that share the rest: its surprisal is the nearest to the entropy."""
    logits = torch.full((12, VOCAB_SIZE), float(np.log(0.4 / 299)))
    logits[:, 7] = float(np.log(0.6))
    entropy = -(0.6 * np.log(0.6) + 0.4 * np.log(0.4 / 299))
    assert abs(-np.log(0.6) - entropy) < abs(-np.log(0.4 / 299) - entropy)
    rows = [row(position=i, typical_p=0.5) for i in range(12)]
    assert [token.token_id for token in step(sampler, logits, rows)] == [7] * 12


def test_a_step_without_rows_has_no_tokens(sampler: DeviceSampler) -> None:
    assert step(sampler, normal(0), [], padded=2) == []
