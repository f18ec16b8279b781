"""Changes to rows of logits before tokens are chosen from them, where the logits are.

Whatever a request's rules ask for (octavo.runtime.logit_rules) comes here as small arrays. They are
joined into one gather and one scatter for all rows, so that a row costs what it changes, not the
vocabulary; on a GPU nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from octavo.runtime.sampler import SampleRow

# Takes an array to the device that the logits are on.
Put = Callable[[NDArray[Any]], Tensor]
# ``f32[vocab]``, which it may change, to the logits that take its place.
Processor = Callable[[Tensor], Tensor]

MASK_BITS = 32

NOTHING_LEFT = (
    "no token is left to choose: the request's rules forbid every one, or the model's logits are "
    "not finite"
)


def _no_ids() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _no_values() -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class LogitEdits:
    """What is done to one row, in this order.

    ``processors`` run; what is not in ``allowed`` (bit ``i % 32`` of word ``i // 32`` for token
    ``i``) or is in ``banned_token_ids`` becomes -inf; ``bias`` is added. Then, at the ``penalized``
    tokens, logits are divided by ``repetition_penalty`` where they are positive, multiplied by it
    elsewhere, and ``penalties`` are subtracted. Ids are distinct. ``error`` says that the row
    failed already.
    """

    processors: tuple[Processor, ...] = ()
    allowed: NDArray[np.int32] | None = None  # [ceil(vocab / 32)]
    banned_token_ids: NDArray[np.int64] = field(default_factory=_no_ids)
    biased_token_ids: NDArray[np.int64] = field(default_factory=_no_ids)
    bias: NDArray[np.float32] = field(default_factory=_no_values)
    repetition_penalty: float = 1.0
    penalized_token_ids: NDArray[np.int64] = field(default_factory=_no_ids)
    penalties: NDArray[np.float32] = field(default_factory=_no_values)
    error: str | None = None


NO_EDITS = LogitEdits()


def is_edited(row: SampleRow) -> bool:
    """Whether a row's token is chosen from other logits than the model's."""
    return bool(row.edits is not None or row.banned_token_ids or _is_typical(row))


def apply_edits(logits: Tensor, rows: Sequence[SampleRow], put: Put) -> dict[int, str]:
    """Change ``f32[R, vocab]`` in place, row by row as its SampleRow says.

    A row's processor that raises spoils that row alone: returns what went wrong by row.
    """
    edits = [row.edits or NO_EDITS for row in rows]
    errors = {i: each.error for i, each in enumerate(edits) if each.error is not None}
    for i, each in enumerate(edits):
        if each.processors:
            error = _process(logits[i], each.processors)
            if error is not None:
                errors[i] = error
    _allow(logits, edits, put)
    _ban(logits, rows, edits, put)
    _add_bias(logits, edits, put)
    _penalize(logits, edits, put)
    _keep_typical(logits, rows, put)
    return errors


def _process(row: Tensor, processors: Sequence[Processor]) -> str | None:
    """Run a user's functions over one row; says what went wrong."""
    try:
        found = row
        for processor in processors:
            found = processor(found)
            if not isinstance(found, Tensor) or found.shape != row.shape:
                got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                return f"a logits processor must return {tuple(row.shape)} logits, got {got}"
        if found is not row:
            row.copy_(found)
    except Exception as error:
        return f"a logits processor raised {type(error).__name__}: {error}"
    return None


def _allow(logits: Tensor, edits: Sequence[LogitEdits], put: Put) -> None:
    masks = {i: each.allowed for i, each in enumerate(edits) if each.allowed is not None}
    if not masks:
        return
    # Byte by byte, the lowest first: a quarter of the memory that whole words would take.
    octets = put(np.stack(list(masks.values())).view(np.uint8))
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_forbidden = ((octets[:, :, None] & bits) == 0).flatten(1)[:, : logits.shape[1]]
    index = put(np.array(list(masks), dtype=np.int64))
    kept = logits.index_select(0, index).masked_fill_(is_forbidden, -torch.inf)
    logits.index_copy_(0, index, kept)


def _ban(logits: Tensor, rows: Sequence[SampleRow], edits: Sequence[LogitEdits], put: Put) -> None:
    banned = [
        np.array(row.banned_token_ids, dtype=np.int64) for row in rows if row.banned_token_ids
    ]
    places = [i for i, row in enumerate(rows) if row.banned_token_ids]
    places += [i for i, each in enumerate(edits) if len(each.banned_token_ids)]
    banned += [each.banned_token_ids for each in edits if len(each.banned_token_ids)]
    if banned:
        logits.view(-1).index_fill_(0, put(_flat(places, banned, logits)), -torch.inf)


def _add_bias(logits: Tensor, edits: Sequence[LogitEdits], put: Put) -> None:
    places = [i for i, each in enumerate(edits) if len(each.bias)]
    if not places:
        return
    index = put(_flat(places, [edits[i].biased_token_ids for i in places], logits))
    flat = logits.view(-1)
    bias = put(np.concatenate([edits[i].bias for i in places]))
    flat.index_copy_(0, index, flat.index_select(0, index) + bias)


def _penalize(logits: Tensor, edits: Sequence[LogitEdits], put: Put) -> None:
    places = [i for i, each in enumerate(edits) if len(each.penalized_token_ids)]
    if not places:
        return
    token_ids = [edits[i].penalized_token_ids for i in places]
    index = put(_flat(places, token_ids, logits))
    factors = np.array([edits[i].repetition_penalty for i in places], dtype=np.float32)
    factor = put(factors.repeat([len(ids) for ids in token_ids]))
    penalty = put(np.concatenate([edits[i].penalties for i in places]))
    flat = logits.view(-1)
    values = flat.index_select(0, index)
    values = torch.where(values > 0.0, values / factor, values * factor) - penalty
    flat.index_copy_(0, index, values)


def _flat(
    places: Sequence[int], token_ids: Sequence[NDArray[np.int64]], logits: Tensor
) -> NDArray[np.int64]:
    """Where the tokens of rows ``places`` lie in all logits laid end to end."""
    vocab_size = logits.shape[1]
    return np.concatenate(
        [ids + place * vocab_size for place, ids in zip(places, token_ids, strict=True)]
    )


def _is_typical(row: SampleRow) -> bool:
    return row.params.typical_p < 1.0 and not row.params.is_greedy


def _keep_typical(logits: Tensor, rows: Sequence[SampleRow], put: Put) -> None:
    """Locally typical sampling (Meister, Pimentel, Wiher, Cotterell 2022), at the temperature.

    Kept are the tokens whose surprisal is nearest to the entropy, the fewest whose probability
    adds up to ``typical_p``, and those as near as the last of them.
    """
    places = [i for i, row in enumerate(rows) if _is_typical(row)]
    if not places:
        return
    params = [rows[i].params for i in places]
    temperature = put(np.array([p.temperature for p in params], dtype=np.float32))
    goal = put(np.array([p.typical_p for p in params], dtype=np.float64))
    index = put(np.array(places, dtype=np.int64))
    picked = logits.index_select(0, index)
    surprisal = -(picked / temperature[:, None]).log_softmax(-1)
    probability = (-surprisal).exp()
    entropy = (surprisal * probability).nansum(-1, keepdim=True)  # 0 * inf of what is forbidden
    distance, order = (surprisal - entropy).abs().sort(dim=-1)
    mass = probability.gather(1, order).double().cumsum(-1)
    last = (mass < goal[:, None]).sum(-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    is_far = (surprisal - entropy).abs() > distance.gather(1, last)
    logits.index_copy_(0, index, picked.masked_fill_(is_far, -torch.inf))
