"""Answers that were given before, by what determines them. Off unless a size is asked for.

An answer depends on the artifact, the salt, the prompt's ids and the sampling parameters, and on
nothing else, if the request is greedy or has a seed and no code of the user's has a say in it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prefix_cache import digest
from octavo.runtime.sampling_params import SamplingParams


def is_deterministic(params: SamplingParams) -> bool:
    """Whether an equal request gives an equal answer."""
    return (params.is_greedy or params.seed is not None) and not params.logits_processors


def result_key(root_key: bytes, prompt_token_ids: Sequence[int], params: SamplingParams) -> bytes:
    """The key of an answer; ``root_key`` as for the blocks of the prefix cache."""
    # The fields of checked parameters are plain values, whose repr tells any two apart.
    written = repr(params).encode("utf-8", "surrogatepass")
    ids = array("q", prompt_token_ids).tobytes()
    return digest(((b"R", root_key), (b"T", ids), (b"P", written)))


class ResultCache:
    """The ``size`` answers that were stored or asked for last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[bytes, RequestOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: bytes) -> RequestOutput | None:
        """The answer, to read only; None when it is not there."""
        found = self._results.get(key)
        if found is not None:
            self._results.move_to_end(key)
        return found

    def put(self, key: bytes, result: RequestOutput) -> None:
        """Store an answer that nobody writes any more, in place of the least recently used."""
        self._results[key] = result
        self._results.move_to_end(key)
        if len(self._results) > self._size:
            self._results.popitem(last=False)

    def clear(self) -> None:
        self._results.clear()
