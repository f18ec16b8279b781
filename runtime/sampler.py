"""From logits to tokens, for all sampled rows of a step at once, on their device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.runtime.logit_edits import NOTHING_LEFT, LogitEdits, apply_edits, is_edited
from octavo.runtime.philox import uniforms
from octavo.runtime.sampling_filters import filter_logits
from octavo.runtime.sampling_params import SamplingParams


class SampleRow(NamedTuple):
    """What one row of logits is sampled by.

    ``seed``, ``stream`` and ``position`` key its draw; ``banned_token_ids`` cannot be chosen;
    ``edits`` are the other changes to its logits. ``forced_token_id`` is taken, whatever the logits
    are, when only its log-probability is wanted. A tuple rather than a dataclass, as
    SampledToken: 256 are made a step.
    """

    params: SamplingParams
    seed: int
    stream: int
    position: int
    banned_token_ids: tuple[int, ...] = ()
    edits: LogitEdits | None = None
    forced_token_id: int | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one place: the chosen token's, then the best ones, best first."""

    chosen: float
    chosen_rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """A row's token. ``error`` says why there is none."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


NOT_FINITE = "the model's logits are not finite"


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Choose a token for each row of ``f32[R, vocab]``; the logits are left as they were.

    Each row's token depends on its own logits and its own SampleRow only.
    """
    with torch.inference_mode():
        edited = [i for i, row in enumerate(rows) if is_edited(row)]
        allowed, errors = _edit(logits, rows, edited)
        best, greedy = allowed.max(dim=-1)
        token_ids = greedy.tolist()
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            picked = allowed if len(drawn) == len(rows) else allowed[drawn]
            ids = _draw(picked, [rows[i] for i in drawn])
            for i, token_id in zip(drawn, ids, strict=True):
                token_ids[i] = token_id
        for i, token_id in forced_tokens(rows).items():
            token_ids[i] = token_id
        logprobs = _logprobs(logits, token_ids, rows)
        faults = (~torch.isfinite(best)).nonzero()[:, 0].tolist()
    errors = fault_messages(faults, edited) | errors
    return [
        SampledToken(token_id, row_logprobs, errors.get(i))
        for i, (token_id, row_logprobs) in enumerate(zip(token_ids, logprobs, strict=True))
    ]


def forced_tokens(rows: Sequence[SampleRow]) -> dict[int, int]:
    """The tokens that are not chosen, by row."""
    return {i: r.forced_token_id for i, r in enumerate(rows) if r.forced_token_id is not None}


def fault_messages(faults: Sequence[int], edited: Collection[int]) -> dict[int, str]:
    """What to say of each row that has no best token."""
    return {i: NOTHING_LEFT if i in edited else NOT_FINITE for i in faults}


def _edit(
    logits: Tensor, rows: Sequence[SampleRow], edited: list[int]
) -> tuple[Tensor, dict[int, str]]:
    """The logits to choose from, and which rows went wrong and how."""
    if not edited:
        return logits, {}
    changed = logits[edited]
    errors = apply_edits(
        changed,
        [rows[i] for i in edited],
        lambda values: torch.from_numpy(values).to(logits.device),
    )
    allowed = logits.index_copy(0, torch.tensor(edited, device=logits.device), changed)
    return allowed, {edited[at]: error for at, error in errors.items()}


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Inverse of the cumulative distribution, in vocabulary order.

    One uniform number a row, and no sort in its way: noise in the last bits of the logits moves a
    border between tokens by as little, and never reorders them.
    """
    device = logits.device
    temperatures = torch.tensor([row.params.temperature for row in rows], device=device)
    kept = filter_logits(
        logits / temperatures[:, None],
        top_k=[row.params.top_k for row in rows],
        top_p=[row.params.top_p for row in rows],
        min_p=[row.params.min_p for row in rows],
    )
    weights = torch.softmax(kept, dim=-1, dtype=torch.float64)
    cumulative = weights.cumsum(dim=-1)
    draws = uniforms(
        [row.seed for row in rows],
        [row.stream for row in rows],
        [row.position for row in rows],
    )
    totals = cumulative[:, -1:]
    goal = torch.from_numpy(draws).to(device)[:, None] * totals
    # The first token whose cumulative weight exceeds the goal: one of weight zero never does.
    goal = torch.minimum(goal, torch.nextafter(totals, torch.zeros_like(totals)))
    chosen = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return chosen.clamp(max=logits.shape[1] - 1).tolist()


def _logprobs(
    logits: Tensor, token_ids: Sequence[int], rows: Sequence[SampleRow]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    counts = logprob_counts(rows, logits.shape[-1])
    if counts:
        asked = list(counts)
        chosen_ids = torch.tensor([token_ids[i] for i in asked], device=logits.device)
        tensors = raw_logprobs(logits[asked], chosen_ids, max(counts.values()))
        for i, row_logprobs in zip(asked, tensors.rows(list(counts.values())), strict=True):
            found[i] = row_logprobs
    return found


def logprob_counts(rows: Sequence[SampleRow], vocab_size: int) -> dict[int, int]:
    """For each row that asks for log-probabilities: how many of the best tokens it wants."""
    return {
        i: _num_top(row.params.logprobs, vocab_size)
        for i, row in enumerate(rows)
        if row.params.logprobs is not None
    }


@dataclass(frozen=True)
class LogprobTensors:
    """What TokenLogprobs are made of, for A rows, on the device or copied from it."""

    chosen: Tensor  # f32[A]
    chosen_rank: Tensor  # i64[A], from 1
    top_token_ids: Tensor  # i64[A, N]
    top_logprobs: Tensor  # f32[A, N]

    def rows(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """For each row its first ``counts[i]`` tokens. Waits for the device."""
        chosen, ranks = self.chosen.tolist(), self.chosen_rank.tolist()
        columns = (chosen, ranks, self.top_token_ids.tolist(), self.top_logprobs.tolist(), counts)
        return [
            TokenLogprobs(value, rank, tuple(ids[:count]), tuple(tops[:count]))
            for value, rank, ids, tops, count in zip(*columns, strict=True)
        ]


def raw_logprobs(logits: Tensor, chosen_ids: Tensor, num_top: int) -> LogprobTensors:
    """Of the raw distribution, before any edit, temperature and filters, as vLLM reports them.

    ``logits`` are ``f32[A, vocab]``, ``chosen_ids`` ``i64[A]``. Nothing here waits for the device.
    """
    values = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = values.gather(1, chosen_ids[:, None])
    ranks = (values > chosen).sum(dim=-1) + 1
    top_values, top_ids = values.topk(num_top, dim=-1)
    return LogprobTensors(chosen[:, 0], ranks, top_ids, top_values)


def _num_top(wanted: int | None, vocab_size: int) -> int:
    return vocab_size if wanted == -1 else min(wanted or 0, vocab_size)
