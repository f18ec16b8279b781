"""The state of one request between its arrival and its last token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from octavo.runtime.prefix_cache import block_key
from octavo.runtime.sampling_params import SamplingParams

# What a policy orders requests by; the last is the order of arrival, which no two share.
Rank = tuple[float, float, int]


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
    room in its blocks, the first ``num_published_blocks`` of which others may share.
    ``num_cached_tokens`` of the prompt were found in the prefix cache when it was first admitted.
    ``waits_for_token`` says that its next step may be planned only when its last token is known:
    how it is sampled depends on it. ``num_prompt_logprobs`` of the prompt's tokens after the first
    have their log-probabilities, if those are wanted. Times are monotonic, in seconds; ``order``
    and ``rank`` are the scheduler's.
    """

    __slots__ = (
        "_block_keys",
        "_root_key",
        "arrival_time",
        "client",
        "deadline",
        "first_scheduled_time",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_slots",
        "order",
        "params",
        "priority",
        "queue_deadline",
        "rank",
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
        root_key: bytes = b"",
        arrival_time: float = 0.0,
        priority: int = 0,
        deadline: float = math.inf,
        queue_deadline: float = math.inf,
        client: str = "",
    ) -> None:
        """``seed`` and ``stream`` key its randomness, see octavo.runtime.philox; ``root_key`` says
        with whom it may share blocks, see octavo.runtime.prefix_cache. The deadlines are when it
        has to be done, and when it has to be started. ``client`` is whose it is."""
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
        self.num_published_blocks = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        self.waits_for_token = False
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.priority = priority
        self.client = client
        self.deadline = deadline
        self.queue_deadline = queue_deadline
        self.order = 0
        self.rank: Rank = (0.0, 0.0, 0)
        self._root_key = root_key
        self._block_keys: list[bytes] = []
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

    @property
    def min_new_tokens(self) -> int:
        """Tokens that it has yet to get at the least: one, unless its end is known."""
        params = self.params
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return self.max_total_tokens - len(self.token_ids)
        return max(1, params.min_tokens - self.num_output_tokens)

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether its whole prompt has to be computed: each token's logits are wanted."""
        return self.wants_prompt_logprobs

    def block_keys(self, count: int, block_size: int) -> list[bytes]:
        """Keys of its first ``count`` blocks, all of whose tokens are known."""
        keys = self._block_keys
        for start in range(len(keys) * block_size, count * block_size, block_size):
            parent = keys[-1] if keys else self._root_key
            keys.append(block_key(parent, self.token_ids[start : start + block_size]))
        return keys[:count]
