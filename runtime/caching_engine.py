"""An engine that computes equal deterministic requests once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.runtime.engine import Engine, Source
from octavo.runtime.errors import require
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import EngineStats, RequestMetrics, RequestOutput
from octavo.runtime.policies import Urgency
from octavo.runtime.result_cache import ResultCache, is_deterministic, result_key
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.shared_computation import Computation, Sharer

_WHOLE = ("stop", "length")


class CachingEngine(Engine):
    """Answers an equal request from the ``result_cache_size`` latest answers, or with the one
    that is being computed.

    A request whose time is limited waits for nobody else's computation, and neither does one that
    is more urgent than that: it is computed by itself. Only whole answers are stored. A stored one
    is given by the next call of ``step``, without a step of the program.
    """

    def __init__(self, *args: Any, result_cache_size: int, **keywords: Any) -> None:
        """All else as for Engine."""
        super().__init__(*args, **keywords)
        self._results = ResultCache(result_cache_size)
        self._computations: dict[str, Computation] = {}  # by their ids
        self._joinable: dict[bytes, Computation] = {}  # by their keys
        self._computation_of: dict[str, Computation] = {}  # by the ids of requests
        self._answers: list[RequestOutput] = []  # that were stored, to be given
        self._has_answered = False
        self._num_computations = 0
        self._num_hits = self._num_joined = self._num_misses = 0

    def _add(
        self, request_id: str, source: Source, params: SamplingParams, kind: OutputKind
    ) -> None:
        urgency = source.urgency
        if not is_deterministic(params) or self._is_refused_or_late(source):
            super()._add(request_id, source, params, kind)
            return
        key = result_key(source.root_key, source.token_ids, params)
        sharer = Sharer(request_id, source.prompt, source.token_ids, kind, source.arrival_time)
        if self._answer(key, sharer, urgency) or self._join(key, sharer, urgency):
            return
        # Its own id: the request may leave, and its id be another's, while this goes on.
        name = f"{request_id}~{self._num_computations}"
        super()._add(name, source, params, "cumulative")
        self._num_computations += 1
        self._num_misses += 1
        computation = Computation(name, key, params, urgency.priority, sharer)
        self._computations[name] = self._computation_of[request_id] = computation
        if not _is_limited(urgency):
            self._joinable[key] = computation

    def abort_request(self, request_id: str) -> RequestOutput | None:
        for place, answer in enumerate(self._answers):
            if answer.request_id == request_id:
                return self._answers.pop(place)
        computation = self._computation_of.pop(request_id, None)
        if computation is None:
            return super().abort_request(request_id)
        if len(computation.sharers) > 1:
            return computation.abort(request_id, self._clock())
        self._forget(computation)
        output = super().abort_request(computation.request_id)
        if output is None:
            return None
        return computation.sharers[request_id].output(computation.take(output))

    def is_live(self, request_id: str) -> bool:
        return (
            request_id in self._computation_of
            or any(answer.request_id == request_id for answer in self._answers)
            or super().is_live(request_id)
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self._answers) or super().has_unfinished_requests()

    def check(self) -> None:
        super().check()
        sharers = {i: each for each in self._computations.values() for i in each.sharers}
        require(sharers == self._computation_of, "requests and their computations differ")
        for request_id in self._computations:
            require(super().is_live(request_id), f"{request_id} is shared and is not computed")

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._results.clear()
        self._joinable.clear()
        for computation in self._computations.values():
            computation.key = None

    def stats(self) -> EngineStats:
        return replace(
            super().stats(),
            result_cache_hits=self._num_hits,
            result_cache_joined=self._num_joined,
            result_cache_misses=self._num_misses,
        )

    def _step(self) -> list[RequestOutput]:
        # Every other time at the most: however many are answered so, the rest go on.
        if self._answers and not self._has_answered:
            self._has_answered = True
            answers, self._answers = self._answers, []
            return answers
        self._has_answered = False
        try:
            outputs = super()._step()
        except BaseException:
            self._forget_failed()
            raise
        return [each for output in outputs for each in self._shared(output)]

    def _is_refused_or_late(self, source: Source) -> bool:
        """Whether the engine would not run the request, however well its answer is known."""
        urgency, arrived = source.urgency, source.arrival_time
        if urgency.priority and not self.scheduler.policy.heeds_priority:
            return True
        limit = min(urgency.deadline(arrived), urgency.queue_deadline(arrived))
        return limit <= self._clock()

    def _answer(self, key: bytes, sharer: Sharer, urgency: Urgency) -> bool:
        """Whether the answer is stored, and will be given."""
        found = self._results.get(key)
        if found is None:
            return False
        now = self._clock()
        output = sharer.output(replace(found, metrics=RequestMetrics(now, now, now, now, now)))
        assert output is not None, "stored answers are finished"
        self._answers.append(output)
        self._num_hits += 1
        self._deadlines["met"] += urgency.deadline_ms is not None
        return True

    def _join(self, key: bytes, sharer: Sharer, urgency: Urgency) -> bool:
        """Whether the answer is being computed, at least as urgently as is wanted here."""
        computation = self._joinable.get(key)
        if computation is None or _is_limited(urgency) or computation.priority > urgency.priority:
            return False
        computation.sharers[sharer.request_id] = sharer
        self._computation_of[sharer.request_id] = computation
        self._num_joined += 1
        return True

    def _shared(self, output: RequestOutput) -> list[RequestOutput]:
        """The outputs of all requests that get this one."""
        computation = self._computations.get(output.request_id)
        if computation is None:
            return [output]
        whole = computation.take(output)
        outputs = [sharer.output(whole) for sharer in computation.sharers.values()]
        if whole.finished:
            self._forget(computation)
            is_whole = all(each.finish_reason in _WHOLE for each in whole.outputs)
            if is_whole and computation.key is not None:
                self._results.put(computation.key, whole)
        return [each for each in outputs if each is not None]

    def _forget(self, computation: Computation) -> None:
        del self._computations[computation.request_id]
        for request_id in computation.sharers:
            self._computation_of.pop(request_id, None)
        key = computation.key
        if key is not None and self._joinable.get(key) is computation:
            del self._joinable[key]

    def _forget_failed(self) -> None:
        """A step that fails ends requests without an output."""
        for computation in list(self._computations.values()):
            if not super().is_live(computation.request_id):
                self._forget(computation)


def _is_limited(urgency: Urgency) -> bool:
    return urgency.deadline_ms is not None or urgency.queue_timeout_ms is not None
