"""Sampling on the device that the logits are on: a step's tokens never wait for the host.

The kernel of the artifact (templates/triton/sample.py.j2) draws the tokens. Edits of the logits and
log-probabilities, which few rows ask for, are PyTorch's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.logit_edits import apply_edits, is_edited
from octavo.runtime.pinned import PinnedBuffer
from octavo.runtime.sampler import (
    LogprobTensors,
    SampledToken,
    SampleRow,
    TokenLogprobs,
    fault_messages,
    forced_tokens,
    logprob_counts,
    raw_logprobs,
)
from octavo.runtime.step_inputs import SampleTensors

if TYPE_CHECKING:
    from octavo.runtime.kernel import Workspace


class SampleModule(Protocol):
    """An artifact's sampling kernel, ``Program.sampler``."""

    VOCAB_SIZE: int

    def run(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        stream: Tensor,
        position: Tensor,
        *,
        out: Tensor,
        fault: Tensor,
        has_filters: bool,
        workspace: Workspace,
    ) -> Tensor:
        """See templates/triton/sample.py.j2."""
        ...


@dataclass(frozen=True)
class SampleInputs:
    """What R rows are sampled by, a column each."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    stream: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[SampleRow], padded: int | None = None) -> SampleInputs:
        """The columns, continued to ``padded`` entries by greedy rows without filters."""
        params = [row.params for row in rows]
        # Greedy is 0 here, whatever tiny number it was.
        temperature = [0.0 if p.is_greedy else p.temperature for p in params]
        rest = max(0, (padded or 0) - len(rows))
        return cls(
            temperature=np.array(temperature + [0.0] * rest, dtype=np.float32),
            top_k=np.array([min(p.top_k, _MOST) for p in params] + [0] * rest, dtype=np.int32),
            top_p=np.array([p.top_p for p in params] + [1.0] * rest, dtype=np.float32),
            min_p=np.array([p.min_p for p in params] + [0.0] * rest, dtype=np.float32),
            seed=_words([row.seed for row in rows] + [0] * rest),
            stream=_words([row.stream for row in rows] + [0] * rest),
            position=_words([row.position for row in rows] + [0] * rest),
        )


_MOST = 2**31 - 1
_MOST_IN_FLIGHT = 4  # steps whose tokens are unread; the engine has 2


def _words(values: list[int]) -> NDArray[np.int64]:
    """64 bits each, of numbers from -2**63 to 2**64 - 1."""
    return np.array([value % 2**64 for value in values], dtype=np.uint64).view(np.int64)


@dataclass(frozen=True)
class _Home:
    """Where a step's ``i64[R]`` and ``i32[R]`` go on the host."""

    tokens: PinnedBuffer
    fault: PinnedBuffer

    @classmethod
    def of(cls, num_rows: int, device: torch.device) -> _Home:
        return cls(PinnedBuffer(8 * num_rows, device), PinnedBuffer(4 * num_rows, device))


class PendingSample:
    """A step's tokens on their way to the host."""

    def __init__(
        self,
        tokens: Tensor,
        fault: Tensor,
        counts: dict[int, int],
        logprobs: LogprobTensors | None,
        home: _Home,
        *,
        edited: Collection[int] = (),
        errors: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Start the copy of ``i64[R]``, ``i32[R]`` and the log-probabilities of rows ``counts``.

        Rows ``edited`` were chosen from other logits than the model's; ``errors`` are known.
        Tokens and faults go to ``home``, which nothing else may be copied to before ``result``.
        """
        self._edited = edited
        self._errors = errors
        self._tokens = home.tokens.take_from(tokens)
        self._fault = home.fault.take_from(fault)
        self._counts = counts
        self._logprobs = None
        if logprobs is not None:
            self._logprobs = LogprobTensors(*map(_to_host, _tensors(logprobs)))
        self._copied = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()
        self._result: list[SampledToken] | None = None

    def result(self) -> list[SampledToken]:
        """The tokens, waited for; the same list when asked again."""
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._result = self._read()
        return self._result

    def _read(self) -> list[SampledToken]:
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            found = self._logprobs.rows(list(self._counts.values()))
            logprobs = dict(zip(self._counts, found, strict=True))
        faults = [i for i, is_fault in enumerate(self._fault.tolist()) if is_fault]
        errors = fault_messages(faults, self._edited) | dict(self._errors)
        return [
            SampledToken(token_id, logprobs.get(i), errors.get(i))
            for i, token_id in enumerate(self._tokens.tolist())
        ]


class DeviceSampler:
    """Chooses tokens for the rows of a step into ``tokens``, in two parts.

    ``sample`` is a fixed sequence of kernels, for CUDA graphs, that treats all rows as unfiltered;
    ``finish`` chooses again where a row has filters or edits, which only the host knows. Of
    its results up to 4 may be unread at a time.
    """

    def __init__(self, module: SampleModule, workspace: Workspace, tokens: Tensor) -> None:
        """``tokens`` is ``i64[max_rows]`` on the device."""
        self.tokens = tokens
        self._module = module
        self._workspace = workspace
        self._fault = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
        homes = (_Home.of(len(tokens), tokens.device) for _ in range(_MOST_IN_FLIGHT))
        self._homes = deque(homes)

    def columns(self, rows: Sequence[SampleRow], padded: int) -> SampleInputs:
        """The parameters of rows as arrays of ``padded`` entries."""
        return SampleInputs.from_rows(rows, padded)

    def sample(
        self, logits: Tensor, sampling: SampleTensors, *, has_filters: bool = False
    ) -> Tensor:
        """A token for each row of ``f32[R, vocab]``: the first R of ``tokens``."""
        num_rows = len(logits)
        return self._run(
            logits, sampling, self.tokens[:num_rows], self._fault[:num_rows], has_filters
        )

    def finish(
        self, logits: Tensor, sampling: SampleTensors, rows: Sequence[SampleRow]
    ) -> PendingSample:
        """After ``sample``: filters, edits, log-probabilities of rows, and the copy to the host.

        ``logits`` and ``sampling`` may have padding after the rows. Nothing in here waits.
        """
        num_rows = len(rows)
        logits, sampling = logits[:num_rows], _each(sampling, lambda column: column[:num_rows])
        if any(_has_filters(row) for row in rows):
            self.sample(logits, sampling, has_filters=True)
        edited = [i for i, row in enumerate(rows) if is_edited(row)]
        errors = self._sample_edited(logits, sampling, rows, edited) if edited else {}
        forced = forced_tokens(rows)
        if forced:
            places, token_ids = np.array(list(forced.items()), dtype=np.int64).T.copy()
            self.tokens.index_copy_(0, self._put(places), self._put(token_ids))
        counts = logprob_counts(rows, self._module.VOCAB_SIZE)
        logprobs = None
        if counts:
            asked = self._put(np.array(list(counts), dtype=np.int64))
            chosen_ids = self.tokens.index_select(0, asked)
            logprobs = raw_logprobs(logits[asked], chosen_ids, max(counts.values()))
        home = self._homes[0]
        self._homes.rotate(1)
        return PendingSample(
            self.tokens[:num_rows],
            self._fault[:num_rows],
            counts,
            logprobs,
            home,
            edited=edited,
            errors=errors,
        )

    def _sample_edited(
        self,
        logits: Tensor,
        sampling: SampleTensors,
        rows: Sequence[SampleRow],
        edited: list[int],
    ) -> dict[int, str]:
        """Choose again for rows ``edited``, from a copy of their logits; says what went wrong."""
        picked = [rows[i] for i in edited]
        index = self._put(np.array(edited, dtype=np.int64))
        allowed = logits.index_select(0, index)
        errors = apply_edits(allowed, picked, self._put)
        tokens, fault = torch.empty_like(index), torch.empty_like(index, dtype=torch.int32)
        self._run(
            allowed,
            _each(sampling, lambda column: column.index_select(0, index)),
            tokens,
            fault,
            any(_has_filters(row) for row in picked),
        )
        self.tokens.index_copy_(0, index, tokens)
        self._fault.index_copy_(0, index, fault)
        return {edited[at]: error for at, error in errors.items()}

    def _run(
        self,
        logits: Tensor,
        sampling: SampleTensors,
        tokens: Tensor,
        fault: Tensor,
        has_filters: bool,
    ) -> Tensor:
        s = sampling
        return self._module.run(
            logits,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.seed,
            s.stream,
            s.position,
            out=tokens,
            fault=fault,
            has_filters=has_filters,
            workspace=self._workspace,
        )

    def _put(self, values: NDArray[Any]) -> Tensor:
        """The array on the device, copied from pinned memory: from other memory it would wait."""
        host = torch.from_numpy(values)
        if not self.tokens.is_cuda:
            return host
        return host.pin_memory().to(self.tokens.device, non_blocking=True)


def make_sampler(program: Any, tokens: Tensor) -> DeviceSampler:
    """The sampler of a program for a cuda target, into ``tokens``."""
    return DeviceSampler(program.sampler, program.workspace, tokens)


def _has_filters(row: SampleRow) -> bool:
    params = row.params
    has_any = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return has_any and not params.is_greedy


def _each(sampling: SampleTensors, change: Callable[[Tensor], Tensor]) -> SampleTensors:
    return SampleTensors(**{f.name: change(getattr(sampling, f.name)) for f in fields(sampling)})


def _tensors(logprobs: LogprobTensors) -> tuple[Tensor, ...]:
    return tuple(getattr(logprobs, f.name) for f in fields(logprobs))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the stream has come here."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
