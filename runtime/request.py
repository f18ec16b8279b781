"""The state of one request between its arrival and its last token."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from octavo.runtime.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again; its tokens are kept, its K and V were given up
    FINISHED = "finished"


class Request:
    """Tokens, progress and limits of a request.

    ``token_ids`` is the prompt and then the output. The first ``num_computed_tokens`` have their K
    and V in the cache, or will have when the steps that are launched have run; the rest is to do,
    whether it is a prompt or the last sampled token. ``num_pending`` is 1 while a launched step
    samples the next token, in row ``source_row`` of that step's tokens. ``num_slots`` tokens have
    room in its blocks. ``waits_for_token`` says that its next step may be planned only when its
    last token is known: how it is sampled depends on it. ``num_prompt_logprobs`` of the prompt's
    tokens after the first have their log-probabilities, if those are wanted.
    """

    __slots__ = (
        "max_total_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_slots",
        "params",
        "request_id",
        "seed",
        "source_row",
        "status",
        "stream",
        "token_ids",
        "waits_for_token",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        seed: int = 0,
        stream: int = 0,
    ) -> None:
        """``seed`` and ``stream`` key its randomness, see octavo.runtime.philox."""
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.stream = stream
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.source_row = 0
        self.num_slots = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        self.waits_for_token = False
        self.status = RequestStatus.WAITING
        wanted = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + wanted)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt tokens are still wanted: those must then be computed."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    @property
    def is_at_limit(self) -> bool:
        """Whether no further token may be generated."""
        return len(self.token_ids) >= self.max_total_tokens
